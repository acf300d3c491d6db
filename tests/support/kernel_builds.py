"""Kernels compiled for a GPU that is not there: what is launched is compiled and does not run."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.errors import PTXASError
from triton.runtime.jit import JITFunction

from vllm_hsd import kernels

_NARROW_LOAD = re.compile(r"ld\.global\S*\.[bu]16\s")
_ACCESS = r"{}\.global\S*?(?:\.v(\d))?\.[bsuf](\d+)\s"


class Usage(NamedTuple):
    """What a compiled kernel uses, in bytes; registers and widest accesses of a thread."""

    registers: int
    stack: int  # where spilled registers go
    shared: int
    narrow_loads: int  # of a single 16-bit logit: a row would take eight times the instructions
    load_bits: int
    store_bits: int


class Build(NamedTuple):
    """A specialization of a kernel: types and compile-time values by argument, and Triton's."""

    name: str
    arguments: dict[str, Any]
    compiled: Any


@dataclass
class Builds:
    """What a block of code launches: by hash, and (kernel, last line of the compiler's message)."""

    built: dict[str, Build] = field(default_factory=dict)
    failed: dict[tuple[str, str], None] = field(default_factory=dict)


def kernels_of_package() -> set[str]:
    names = [name for _, name, package in pkgutil.iter_modules(kernels.__path__) if not package]
    modules = [importlib.import_module(f"{kernels.__name__}.{name}") for name in names]
    return {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }


@contextlib.contextmanager
def compile_launches(capability: int, alike: Collection[str] = ()) -> Iterator[Builds]:
    """Compile what is launched in a block in place of running it, on tensors of any device.

    Triton specializes on the arguments as it does for serving: types, ones, multiples of 16. The
    address of a view of meta tensors is its offset: those that are not aligned are told apart.
    Of launches that differ only in the arguments `alike` the first one is compiled.
    """
    builds, seen = Builds(), set()

    def compile_only(self, *args, grid, warmup, **kwargs):
        key = _key(self, capability, args, kwargs, alike)
        if key in seen:
            return
        seen.add(key)
        try:
            compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        except (triton.CompilationError, PTXASError, RuntimeError) as error:
            # The first error of a chain says what is wrong, the others where.
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            builds.failed[self.fn.__name__, str(cause).strip().splitlines()[-1]] = None
            return
        if compiled.hash not in builds.built:
            source = compiled.src
            names = dict(enumerate(source.signature))
            constants = {names[path[0]]: value for path, value in source.constants.items()}
            arguments = source.signature | constants
            builds.built[compiled.hash] = Build(self.fn.__name__, arguments, compiled)

    run = JITFunction.run
    with _in_place_of_run(compile_only, capability):
        yield builds


@contextlib.contextmanager
def launch_keys(capability: int) -> Iterator[dict[str, set[str]]]:
    """What is launched in a block, which does not run: keys of Triton's caches by kernel."""
    found: dict[str, set[str]] = {}

    def bind_only(self, *args, grid, warmup, **kwargs):
        key = _key(self, capability, args, kwargs)
        found.setdefault(self.fn.__name__, set()).add(key)

    with _in_place_of_run(bind_only, capability):
        yield found


def _key(kernel: JITFunction, capability: int, args, kwargs, left_out: Collection[str] = ()) -> str:
    """Triton's key of a launch, without some of its arguments."""
    *_, binder = kernel.device_caches[capability]
    _, specialization, options = binder(*args, debug=False, **kwargs)
    values = zip(kernel.params, specialization, strict=True)
    kept = [value for parameter, value in values if parameter.name not in left_out]
    return f"{kernel.fn.__name__} {kept} {options}"


@contextlib.contextmanager
def _in_place_of_run(run: Any, capability: int) -> Iterator[None]:
    if triton.knobs.runtime.interpret:
        raise RuntimeError("Unset TRITON_INTERPRET: interpreted kernels are not compiled.")
    # One cache of specializations for every device number.
    gpu = SimpleNamespace(
        get_current_device=lambda: capability,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    with mock.patch.object(JITFunction, "run", run), mock.patch.object(driver, "_active", gpu):
        yield


def spills_in_loops(build: Build) -> int:
    """Loads from and stores to the stack within the innermost loops of a kernel's machine code."""
    text = _dumped(build, "-sass")
    code = [
        (int(at, 16), line) for at, line in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(\S.*?);", text)
    ]
    jumps = [(at, re.search(r"\bBRA\S* .*?0x([0-9a-f]+)", line)) for at, line in code]
    loops = [(int(to[1], 16), at) for at, to in jumps if to and int(to[1], 16) < at]
    inner = [
        (first, last)
        for first, last in loops
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in loops)
    ]
    on_stack = [at for at, line in code if re.search(r"\b(STL|LDL)\b", line)]
    return sum(first <= at <= last for at in on_stack for first, last in inner)


def usage(build: Build) -> Usage:
    ptx, report = build.compiled.asm["ptx"], _dumped(build, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"{build.name}: no registers in {report!r}.")
    return Usage(
        int(found.group(1)),
        int(found.group(2)),
        build.compiled.metadata.shared,
        len(_NARROW_LOAD.findall(ptx)),
        _widest("ld", ptx),
        _widest("st", ptx),
    )


def _dumped(build: Build, what: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory, "cubin")
        cubin.write_bytes(build.compiled.asm["cubin"])
        dump = [triton.knobs.nvidia.cuobjdump.path, what, cubin]
        return subprocess.run(dump, capture_output=True, text=True, check=True).stdout


def _widest(instruction: str, ptx: str) -> int:
    """Bits of the widest access of this kind, 0 without one."""
    found = re.findall(_ACCESS.format(instruction), ptx)
    return max((int(count or 1) * int(bits) for count, bits in found), default=0)
