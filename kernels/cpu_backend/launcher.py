"""Launches of compiled kernels: Triton's way, and a short one for calls that were made before.

Triton's way costs some 10 microseconds of Python. `kernel[grid](...)` therefore goes to launcher.c,
which finds the compiled kernel by one key of all arguments. Whatever it does not know (the first
call, a tuple, a hook, a replaced `JITFunction.run`) goes Triton's way.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from . import checks, toolchain
from .compiler import IGNORED

# Entry of a loaded kernel -> its library.
LIBRARIES: dict[int, ctypes.CDLL] = {}


@functools.cache
def extension() -> ModuleType:
    """launcher.c, compiled once for each Python."""
    source = (Path(__file__).parent / "launcher.c").read_text()
    options = f"{toolchain.flags()} -I{toolchain.HEADERS} -pthread"
    path = toolchain.build(source, "launcher", options)
    spec = importlib.util.spec_from_file_location("launcher", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parameter = torch.nn.Parameter
    module.set_up(raise_fault, registered, torch.Tensor, parameter, knobs.runtime)
    module.set_pool(openmp(), torch.get_num_threads())
    return module


def openmp() -> int:
    """Address of `GOMP_parallel` in the OpenMP library of this process, 0 if there is none.

    Its threads are torch's, which vLLM binds to cores; threads of our own would share one of them.
    """
    mapped = Path("/proc/self/maps")
    lines = mapped.read_text().splitlines() if mapped.exists() else []
    paths = dict.fromkeys(line.split()[-1] for line in lines if "omp" in line and "/" in line)
    for path in paths:
        if Path(path).name.startswith(("libgomp", "libiomp", "libomp")):
            function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            return ctypes.cast(function, ctypes.c_void_p).value or 0 if function else 0
    return 0


def load(path: str) -> tuple[ctypes.CDLL, int]:
    """A kernel's library and its entry."""
    library = ctypes.CDLL(path)
    entry = ctypes.cast(library.entry, ctypes.c_void_p).value
    assert entry is not None
    LIBRARIES[entry] = library
    return library, entry


def make(src, metadata) -> Callable:
    """What Triton calls for a launch of a compiled kernel."""
    codes = codes_of(src.signature.values())
    launch, packing = extension().launch, codes.encode()

    def call(x, y, z, stream, function, packed, metadata, enter, leave, *args):
        if enter is not None:
            enter(metadata)
        ranges, order, threads = _checked(args, codes, x * y * z)
        launch(function, packing, x, y, z, args, ranges, order, threads)
        if leave is not None:
            leave(metadata)

    return call


def codes_of(signature) -> str:
    """A letter for each argument: how it is packed; see execute.h."""
    found = ""
    for kind in signature:
        if isinstance(kind, tuple):
            found += f"({codes_of(kind)})"
        elif kind == "constexpr":
            found += "-"
        elif kind[0] == "*":
            found += "p"
        elif kind.startswith(("fp", "bf", "f")):
            found += "f"
        elif kind.startswith(("i", "u")):
            found += "i"
        else:
            raise NotImplementedError(f"an argument of type {kind}")
    return found


# ---------------------------------------------------------------------- checks
def _checked(args: tuple, codes: str, programs: int) -> tuple[bytes | None, bytes | None, int]:
    """(range of addresses of every argument, order of programs, threads) by the active checks."""
    active = checks.ACTIVE
    ranges = order = None
    if active.bounds:
        ranges = b"".join(struct.pack("QQ", *bounds(arg)) for arg in passed(args, iter(codes)))
    if active.order is not None and programs:
        import numpy as np

        order = np.random.default_rng(active.order).permutation(programs).astype("int64").tobytes()
    return ranges, order, active.threads


def passed(args: Sequence, codes: Iterator[str]) -> list:
    """Arguments in the order of slots: without those of compile time, tuples taken apart."""
    found: list = []
    for arg in args:
        code = next(codes)
        if code == "(":
            found += passed(arg, codes)
            next(codes)  # )
        elif code != "-":
            found.append(arg)
    return found


def bounds(arg) -> tuple[int, int]:
    """The addresses of the elements of a tensor, and of all memory for what is no tensor."""
    if not hasattr(arg, "stride"):
        return 0, (1 << 64) - 1
    last = sum((size - 1) * step for size, step in zip(arg.shape, arg.stride(), strict=True))
    count = last + 1 if arg.numel() else 0
    return arg.data_ptr(), arg.data_ptr() + count * arg.element_size()


def raise_fault(
    entry: int,
    argument: int,
    place: int,
    message: str | None,
    program: tuple,
    address: int,
    base: int,
) -> None:
    """Raise what the first fault of a launch was.

    Raises:
        IndexError: an access outside of its tensor.
        AssertionError: an assertion of the kernel failed.
    """
    places = (ctypes.c_char_p * (place + 1)).in_dll(LIBRARIES[entry], "places")
    where = f"{_text(places[place])}, program {program}"
    if argument < 0:
        raise AssertionError(f"{where}: {message}")
    names = (ctypes.c_char_p * (argument + 1)).in_dll(LIBRARIES[entry], "arguments")
    raise IndexError(
        f"{where}: {address - base} bytes after the start of argument "
        f"'{_text(names[argument])}' is outside of its tensor"
    )


# ---------------------------------------------------------------------- the short way
def replace_launches() -> None:
    """Let `kernel[grid]` go the short way; later calls change nothing.

    Where checks are active Triton's way stays, since it is the one that makes them.
    """
    if not checks.ACTIVE.any() and "__getitem__" not in vars(JITFunction):
        JITFunction.__getitem__ = short_way()


def short_way() -> Callable:
    """What takes the place of `JITFunction.__getitem__`: (kernel, grid) -> a launch."""
    usual, run, of_grid = JITFunction.__getitem__, JITFunction.run, extension().of_grid
    caches: dict[Any, Any] = {}

    def launch_on(self, grid):
        cache = caches.get(id(self))
        if cache is None:
            if type(self) is not JITFunction:
                return usual(self, grid)
            cache = caches[id(self)] = cache_of(self, run)
        return of_grid(cache, grid)

    return launch_on


def cache_of(jit, run: Callable):
    """The compiled kernels of a JITFunction by the keys of calls, none at first."""
    kinds = "".join(
        "c" if p.is_constexpr else "n" if p.do_not_specialize else "s" for p in jit.params
    )
    defaults = tuple(p.default if p.has_default else jit for p in jit.params)
    names = {p.name: k for k, p in enumerate(jit.params)}
    return extension().Cache(jit, run, names, IGNORED, defaults, jit.pre_run_hooks, kinds)


def registered(jit, kernel) -> tuple[int, bytes, tuple] | None:
    """(entry, codes, globals that it depends on) of a kernel that Triton has just launched."""
    if type(kernel) is not CompiledKernel or kernel.function is None:
        return None
    codes = codes_of(kernel.src.signature.values())
    if "(" in codes or len(codes) != len(jit.params):
        return None
    # Triton has copies of the values, and has just compared them with these.
    used = jit.used_global_vals.items()
    seen = tuple((name, where[name], where) for (name, _), (_, where) in used)
    return kernel.function, codes.encode(), seen


def _text(given: bytes | None) -> str:
    return (given or b"").decode()
