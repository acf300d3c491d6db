"""Shared objects from C source, made by the host's compiler and kept in Triton's cache."""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from triton.runtime.cache import get_cache_manager

HERE = Path(__file__).parent
# No -ffast-math: kernels meet NaN and infinities on purpose, and sums have an order.
_COMMON = (
    "-march=native -std=gnu11 -shared -fPIC -fwrapv -fno-strict-aliasing -fno-math-errno "
    "-fno-trapping-math -ffp-contract=off -fopenmp-simd -fno-semantic-interposition "
    "-Werror=implicit-function-declaration"
)
_FAST = "-O2 -ftree-vectorize -fvect-cost-model=dynamic"
# What is not written is found, and compiling takes half as long.
_CHECKED = "-O1 -ftrivial-auto-var-init=pattern"

HEADERS = Path(sysconfig.get_paths()["include"])


def missing() -> str | None:
    """What is to be installed before kernels can be compiled; None for nothing."""
    install = "install {} (Debian, Ubuntu: apt install {}; Fedora: dnf install {})".format
    if (found := compiler()) is None:
        return f"no C compiler is installed: {install('gcc', 'gcc', 'gcc')}"
    if not _has_float16(*found):
        return f"{found[0]} has no _Float16: {install('gcc 12', 'gcc-12', 'gcc')} and set CC"
    if not (HEADERS / "Python.h").exists():
        headers = "Python's headers", "python3-dev", "python3-devel"
        return f"no Python.h is installed: {install(*headers)}"
    return None


def compiler() -> list[str] | None:
    """Command of the C compiler: `CC`, gcc, cc or clang."""
    given = shlex.split(os.environ.get("CC", ""))
    named = [given] if given else [["gcc"], ["cc"], ["clang"]]
    return next(([path, *rest] for name, *rest in named if (path := shutil.which(name))), None)


@functools.cache
def _has_float16(*command: str) -> bool:
    """gcc does on x86 from release 12 on."""
    asked = [*command, "-x", "c", "-fsyntax-only", "-"]
    return not subprocess.run(asked, input=b"_Float16 half;", capture_output=True).returncode


def flags(bounds: bool = False) -> str:
    """Options of the compiler, with bounds checked or not; `TRITON_CPU_FLAGS` adds some."""
    return f"{_CHECKED if bounds else _FAST} {_COMMON} {os.environ.get('TRITON_CPU_FLAGS', '')}"


@functools.cache
def toolchain() -> str:
    """A hash of what objects depend on besides source and options: compiler, CPU, headers."""
    asked = [*_compiler_or_raise(), *["-march=native", "-v", "-dM", "-E", "-x", "c", "/dev/null"]]
    told = subprocess.run(asked, capture_output=True, text=True, check=True)
    return _hash(told.stdout, told.stderr, *_files(".h"))


@functools.cache
def identity() -> str:
    """A hash of what the C source of a kernel depends on, and its object."""
    return _hash(toolchain(), *_files(".py"))


def _files(suffix: str) -> list[str]:
    return [path.read_text() for path in sorted(HERE.iterdir()) if path.suffix == suffix]


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def build(source: str, name: str, options: str) -> str:
    """Path of the shared object of C source, compiled once for each content and options.

    Raises:
        RuntimeError: there is no compiler, or it refuses the source.
    """
    cache = get_cache_manager(_hash(source, toolchain(), options))
    file = f"{name[:100]}.so"
    if found := cache.get_file(file):
        return found
    with tempfile.TemporaryDirectory() as folder:
        c, so = Path(folder, "source.c"), Path(folder, "object.so")
        c.write_text(source)
        command = [*_compiler_or_raise(), *shlex.split(options), f"-I{HERE}", str(c)]
        command += ["-o", str(so), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            kept = Path(tempfile.mkdtemp(), f"{name[:60]}.c")
            kept.write_text(source)
            raise RuntimeError(f"{' '.join(command)} failed on {kept}: {done.stderr[:3000]}")
        return cache.put(so.read_bytes(), file, binary=True)


def _compiler_or_raise() -> list[str]:
    if missed := missing():
        raise RuntimeError(f"Triton kernels are compiled for this CPU, and {missed}.")
    return compiler() or []
