"""Loads, stores and atomics, and the check of their addresses."""

from __future__ import annotations

from collections.abc import Callable

from .addresses import address
from .elements import IN_MEMORY, SIZES, loaded, stored
from .generator import COMPUTED, Generator, handles
from .index import Indices
from .ir import Op, Value
from .loop import Loop


def _lvalue(g: Generator, loop: Loop, pointer: Value, idx: Indices, elem: str) -> str:
    """The place in memory that a pointer leads to."""
    kind = IN_MEMORY[elem]
    found = address(g, loop, pointer, idx, SIZES[elem]) if loop.rank else None
    if found is None or not pointer.type.is_tensor:
        return f"*({kind}*)({g.element(loop, pointer, idx)})"
    base, k = found
    if k == 0:
        return f"*({kind}*)({base})"
    return f"(({kind}*)({base}))[{loop.inner if k == 1 else f'(long){loop.inner}*{k}'}]"


def _inside(g: Generator, op: Op, pointer: str, elem: str) -> str | None:
    """C expression of whether an address lies in a tensor that its pointer comes from.

    Where it does not, evaluating the expression records the fault. None: there is nothing to check.
    """
    arguments = g.origins.get(op.operands[0])
    if not arguments:
        return None
    size = SIZES[elem]
    *others, last = sorted(arguments)
    either = "".join(f"tc_within(run, {k}, {pointer}, {size}) || " for k in others)
    return f"({either}tc_inside(run, pid, {last}, {pointer}, {size}, {g.place(op)}))"


def _mask(g: Generator, loop: Loop, op: Op, idx: Indices, operand: int) -> str:
    """The mask of an access, "1" where it has none."""
    if len(op.operands) <= operand:
        return "1"
    mask = op.operands[operand]
    if mask.type.is_tensor:
        loop.masks.append((mask, idx))
    return g.element(loop, mask, idx)


def _allowed(g: Generator, op: Op, mask: str, place: str, elem: str) -> str:
    """The mask, and that the address is inside."""
    inside = _inside(g, op, f"(char*)&({place})", elem)
    if inside is None:
        return mask
    return inside if mask == "1" else f"({mask} && {inside})"


def _load(g: Generator, loop: Loop, op: Op, idx: Indices, value: Value) -> str:
    """An element of what tt.load returns."""
    elem = value.type.elem
    mask = _mask(g, loop, op, idx, 1)
    other = g.element(loop, op.operands[2], idx) if len(op.operands) > 2 and mask != "1" else "0"
    if mask == "0":
        return other
    place = _lvalue(g, loop, op.operands[0], idx, elem)
    allowed = _allowed(g, op, mask, place, elem)
    got = loaded(elem, place)
    return got if allowed == "1" else f"({allowed} ? {got} : {other})"


COMPUTED["tt.load"] = _load


@handles("tt.load")
def load(g: Generator, op: Op) -> None:
    result = op.results[0]
    if result.type.is_tensor:
        if result.uses:
            g.pending[result] = None
        return
    g.declare(result)
    g.run_loop((), lambda loop, idx: loop.body.append(
        f"{result.name} = {_load(g, loop, op, idx, result)};"
    ))  # fmt: skip


@handles("tt.store")
def store(g: Generator, op: Op) -> None:
    pointer, value, *mask = op.operands
    elem = value.type.elem
    g.settle_loads()

    def write(loop: Loop, idx: Indices) -> None:
        allowed = _mask(g, loop, op, idx, 2)
        if allowed == "0":
            for kept in list(loop.keep):  # arrays that are filled on the way: all of them
                g.element(loop, kept, idx)
            return
        e = g.element(loop, value, idx)
        place = _lvalue(g, loop, pointer, idx, elem)
        allowed = _allowed(g, op, allowed, place, elem)
        guard = "" if allowed == "1" else f"if ({allowed}) "
        loop.body.append(f"{guard}{place} = {stored(elem, e)};")

    g.run_loop(pointer.type.shape, write, only=mask[0] if mask else None)


@handles("tt.atomic_rmw")
def atomic_rmw(g: Generator, op: Op) -> None:
    kind, elem = op.attrs["words"][0], op.operands[1].type.elem
    _atomic(g, op, lambda p, v: f"tc_atomic_{kind}_{elem}({p}, {v[0]})", 1, 2)


@handles("tt.atomic_cas")
def atomic_cas(g: Generator, op: Op) -> None:
    elem = op.operands[1].type.elem
    _atomic(g, op, lambda p, v: f"tc_cas_{elem}({p}, {v[0]}, {v[1]})", 2, 3)


def _atomic(
    g: Generator, op: Op, call: Callable[[str, list[str]], str], values: int, mask: int
) -> None:
    """One call after another; `values` operands follow the pointer, `mask` is the mask's place."""
    pointer, result = op.operands[0], op.results[0]
    elem = op.operands[1].type.elem
    g.settle_loads()
    if result.uses or not result.type.is_tensor:
        g.declare(result)

    def write(loop: Loop, idx: Indices) -> None:
        p = g.element(loop, pointer, idx)
        given = [g.element(loop, each, idx) for each in op.operands[1 : 1 + values]]
        allowed = _mask(g, loop, op, idx, mask)
        inside = _inside(g, op, p, elem)
        if inside is not None:
            allowed = f"({allowed} && {inside})"
        target = g.at(result, idx) if result in g.arrays else result.name
        if not result.uses:
            loop.body.append(f"if ({allowed}) {call(p, given)};")
        else:
            loop.body.append(f"{target} = {allowed} ? {call(p, given)} : 0;")

    g.run_loop(pointer.type.shape, write, splits=False, pragma="GCC unroll 1")
