"""Addresses and masks as functions of the innermost loop variable.

An address `base + i` becomes `base[i]`, which C compilers vectorize, and a mask `a + i < n` splits
the loop: lanes 0 .. n - a have it, the others have not. 32-bit sums are taken as not wrapping.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .elements import SIZES, int_constant
from .index import Index, Indices, depends, reshapes_linearly, through_view
from .ir import Op, Value
from .scalars import VIEWS

if TYPE_CHECKING:
    from .generator import Generator
    from .loop import Loop

# (C expression that the innermost variable is not in, coefficient of that variable)
Affine = tuple[str, int]


def affine(g: Generator, loop: Loop, value: Value, idx: Indices) -> Affine | None:
    """An integer as an affine function of the innermost variable, if it is one."""
    if not value.type.is_tensor:
        return f"(int64_t){value.name}", 0
    if not depends(idx, loop.inner):
        return f"(int64_t){g.element(loop, value, idx)}", 0
    op = value.op
    if op is None:
        return None
    if _is_view(op):
        return affine(g, loop, op.operands[0], through_view(op, idx))
    if op.name == "arith.constant":
        return f"{int_constant(op)}L", 0
    if op.name == "tt.make_range":
        i = idx[0] + Index((), int(op.attrs["start"]))
        return f"(int64_t)({i.without(loop.inner).c()})", i.coefficient(loop.inner)
    if op.name in ("arith.extsi", "arith.index_cast"):
        wide = op.operands[0].type.elem != "i1"
        return affine(g, loop, op.operands[0], idx) if wide else None
    if op.name not in ("arith.addi", "arith.subi", "arith.muli"):
        return None
    a, b = (affine(g, loop, operand, idx) for operand in op.operands)
    if a is None or b is None:
        return None
    if op.name == "arith.muli":
        return _product(a, b)
    sign, k = ("+", a[1] + b[1]) if op.name == "arith.addi" else ("-", a[1] - b[1])
    return f"({a[0]} {sign} {b[0]})", k


def _is_view(op: Op) -> bool:
    """A view whose operand has the element at an index that `through_view` gives, array or not."""
    if op.name == "tt.reshape":
        return reshapes_linearly(op.operands[0].type.shape, op.results[0].type.shape)
    return op.name in VIEWS


def _product(a: Affine, b: Affine) -> Affine | None:
    if a[1] == 0:
        a, b = b, a
    if a[1] == 0:
        return f"({a[0]} * {b[0]})", 0
    factor = re.fullmatch(r"(-?\d+)L", b[0])
    if b[1] or not factor:
        return None
    return f"({a[0]} * {b[0]})", a[1] * int(factor.group(1))


def address(g: Generator, loop: Loop, pointer: Value, idx: Indices, size: int) -> Affine | None:
    """A pointer as (base in bytes, coefficient in elements of `size` bytes), if it is affine."""
    if not pointer.type.is_tensor:
        return pointer.name, 0
    if not depends(idx, loop.inner):
        return g.element(loop, pointer, idx), 0
    op = pointer.op
    if op is None:
        return None
    if _is_view(op):
        return address(g, loop, op.operands[0], through_view(op, idx), size)
    if op.name == "tt.bitcast":
        return address(g, loop, op.operands[0], idx, size)
    if op.name != "tt.addptr" or SIZES[pointer.type.pointed] != size:
        return None
    base = address(g, loop, op.operands[0], idx, size)
    offset = base and affine(g, loop, op.operands[1], idx)
    if not (base and offset):
        return None
    return f"({base[0]} + {offset[0]} * {size})", base[1] + offset[1]


def prefix(g: Generator, loop: Loop, mask: Value, idx: Indices) -> str | None:
    """C expression of how many iterations of the innermost loop, from 0 on, have a mask.

    It may be negative or more than there are. None: they need not be the first ones.
    """
    count = loop.shape[-1]
    if not mask.type.is_tensor or not depends(idx, loop.inner):
        return f"({g.element(loop, mask, idx)} ? {count}L : 0L)"
    op = mask.op
    if op is None:
        return None
    if _is_view(op):
        return prefix(g, loop, op.operands[0], through_view(op, idx))
    if op.name == "arith.constant":
        return f"{count}L" if op.attrs["value"] == "true" else None
    if op.name == "arith.andi":
        one = prefix(g, loop, op.operands[0], idx)
        two = one and prefix(g, loop, op.operands[1], idx)
        return f"tc_min({one}, {two})" if two else None
    if op.name == "arith.cmpi":
        return _prefix_of_comparison(g, loop, op, idx)
    return None


def _prefix_of_comparison(g: Generator, loop: Loop, op: Op, idx: Indices) -> str | None:
    a, b = op.operands
    predicate = op.attrs["predicate"]
    if predicate in ("sgt", "sge"):
        a, b, predicate = b, a, "slt" if predicate == "sgt" else "sle"
    if predicate not in ("slt", "sle") or a.type.elem == "i1":
        return None
    left, right = affine(g, loop, a, idx), affine(g, loop, b, idx)
    if left is None or right is None or left[1] != 1 or right[1] != 0:
        return None
    return f"({right[0]} - {left[0]}{' + 1' if predicate == 'sle' else ''})"
