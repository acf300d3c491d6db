"""Indices of elements as linear combinations of loop variables, and what views make of them."""

from __future__ import annotations

import re
from collections import defaultdict

from .ir import Op


class Index:
    """sum of coefficient x loop variable, plus a constant."""

    __slots__ = ("const", "key", "terms")

    def __init__(self, terms=(), const: int = 0) -> None:
        self.terms, self.const = tuple(sorted(terms)), const
        self.key = (self.terms, const)

    def __add__(self, other: Index) -> Index:
        total: dict[str, int] = defaultdict(int)
        for var, k in (*self.terms, *other.terms):
            total[var] += k
        return Index([(var, k) for var, k in total.items() if k], self.const + other.const)

    def __mul__(self, factor: int) -> Index:
        return Index([(v, k * factor) for v, k in self.terms if k * factor], self.const * factor)

    def coefficient(self, var: str | None) -> int:
        return dict(self.terms).get(var, 0)

    def without(self, var: str | None) -> Index:
        return Index([(v, k) for v, k in self.terms if v != var], self.const)

    def c(self) -> str:
        parts = [v if k == 1 else f"{v}*{k}" for v, k in self.terms]
        if self.const or not parts:
            parts.append(str(self.const))
        return "+".join(parts)


ZERO = Index()
Indices = tuple[Index, ...]


def keys(idx: Indices) -> tuple:
    return tuple(i.key for i in idx)


def linear(shape: tuple[int, ...], idx: Indices) -> Index:
    """The place of an element in a dense array."""
    total, stride = ZERO, 1
    for size, i in zip(reversed(shape), reversed(idx), strict=True):
        total = total + i * stride
        stride *= size
    return total


def depends(idx: Indices, var: str | None) -> bool:
    return any(i.coefficient(var) for i in idx)


def through_view(op: Op, idx: Indices) -> Indices:
    """Index of a view's operand that belongs to an index of its result."""
    source = op.operands[0].type.shape
    if op.name == "tt.broadcast":
        return tuple(ZERO if n == 1 else i for n, i in zip(source, idx, strict=True))
    if op.name == "tt.expand_dims":
        axis = int(op.attrs["axis"])
        return idx[:axis] + idx[axis + 1 :]
    if op.name == "tt.trans":
        order = [int(n) for n in re.findall(r"\d+", op.attrs["order"].split(":")[1])]
        return tuple(idx[order.index(axis)] for axis in range(len(order)))
    if op.name == "tt.reshape":
        return _reshaped(source, op.results[0].type.shape, idx)
    return tuple(ZERO for _ in source)  # tt.unsplat


def reshapes_linearly(source: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Each axis of the source is a linear function of axes of the target."""
    one, two = [n for n in source if n > 1], [n for n in target if n > 1]
    return one == two or len(one) <= 1 or _parts(source, target) is not None


def _parts(source: tuple[int, ...], target: tuple[int, ...]) -> list[list[int]] | None:
    """For every axis of the source the axes of the target that it is split into, if it is."""
    parts, axis = [], 0
    for n in source:
        part, size = [], 1
        while size < n:
            if axis == len(target):
                return None
            size *= target[axis]
            part.append(axis)
            axis += 1
        if size != n:
            return None
        parts.append(part)
    return parts


def _reshaped(source: tuple[int, ...], target: tuple[int, ...], idx: Indices) -> Indices:
    one, two = [n for n in source if n > 1], [n for n in target if n > 1]
    if one == two:
        kept = iter([i for n, i in zip(target, idx, strict=True) if n > 1])
        return tuple(next(kept) if n > 1 else ZERO for n in source)
    if len(one) > 1 and (parts := _parts(source, target)) is not None:
        return tuple(
            linear(tuple(target[k] for k in part), tuple(idx[k] for k in part)) for part in parts
        )
    # One axis; or an array, of which any index will do that has the right place.
    total = linear(target, idx)
    axis = next((k for k, n in enumerate(source) if n > 1), 0) if len(one) <= 1 else len(source) - 1
    return tuple(total if k == axis else ZERO for k in range(len(source)))
