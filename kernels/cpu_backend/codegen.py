"""The C source of a kernel: its program, and the entry that runs a part of the grid."""

from __future__ import annotations

# Imported for the operations that they handle.
from . import control, memory, reductions, scans, tensors  # noqa: F401
from .elements import from_slot
from .generator import Generator, prototype
from .ir import Function


def c_source(functions: list[Function], *, bounds: bool = False) -> str:
    """C of a kernel, which includes prelude.h and exports `entry`, `places` and `arguments`.

    Args:
        functions: the kernel, and the functions of scalars that are called, not inlined.
        bounds: check every access of memory in the kernel itself; see `Generator`.

    Raises:
        Unsupported: an operation is not known; says which, of which kernel, and where.
    """
    function, *called = functions
    callees = {each.name: f"called_{k}" for k, each in enumerate(called)}
    g = Generator(function, bounds=bounds, callees=callees)
    inner = [Generator(each, callees=callees, places=g.places) for each in called]
    heads = [prototype(each, callees[each.name]) + ";" for each in called]
    bodies = [g.c_function("program")]
    bodies += [each.c_function(callees[each.function.name]) for each in inner]
    slots = (from_slot(arg.type.elem, f"run->slots[{k}]") for k, arg in enumerate(function.args))
    call = "".join(f", {slot}" for slot in slots)
    return "\n".join(
        [
            '#include "prelude.h"',
            *heads,
            *bodies,
            "void entry(const tc_run *run, int64_t begin, int64_t end) {",
            "const int64_t x = run->grid[0], y = run->grid[1];",
            "for (int64_t i = begin; i < end; i++) {",
            "const int32_t pid[3] = {i % x, i / x % y, i / (x * y)};",
            f"program(run, pid{call});",
            "}",
            "}",
            _strings("places", [*g.places]),
            _strings("arguments", function.names if bounds else []),
            "",
        ]
    )


def _strings(name: str, values: list[str]) -> str:
    items = "".join(f'"{value}", ' for value in values)
    return f"const char *const {name}[] = {{{items}0}};"
