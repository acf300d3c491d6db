"""A function of Triton's IR (TTIR) as plain objects: operations, values, blocks, types."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Type:
    """The type of a value.

    Attributes:
        elem: element type as MLIR prints it ("i32", "bf16", ...), "ptr" for pointers.
        sizes: of a tensor; None for a scalar.
        pointee: what pointers point to.
    """

    elem: str
    sizes: tuple[int, ...] | None = None
    pointee: Type | None = None

    @property
    def is_tensor(self) -> bool:
        return self.sizes is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a tensor; empty for a scalar."""
        return self.sizes or ()

    @property
    def pointed(self) -> str:
        """The element type that a pointer points to."""
        assert self.pointee is not None
        return self.pointee.elem

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def with_sizes(self, sizes: tuple[int, ...] | None) -> Type:
        return Type(self.elem, sizes, self.pointee)


@dataclass(eq=False)
class Value:
    """A result of an operation, or an argument of a block (`op` is None).

    Attributes:
        name: unique in its function, and valid in C.
        index: its place among the results or arguments.
    """

    name: str
    type: Type
    block: Block
    op: Op | None = None
    index: int = 0
    uses: list[Op] = field(default_factory=list)

    @property
    def maker(self) -> str:
        """Name of the operation whose result it is; empty for an argument."""
        return self.op.name if self.op else ""


@dataclass(eq=False)
class Op:
    """An operation.

    Attributes:
        attrs: what is printed as `key = value`, and what its form says in other ways.
        text: the line it was parsed from.
        successors: (label, operands handed to that block) of branches.
        place: file and line of the kernel's source, "" where unknown.
    """

    name: str
    text: str
    block: Block
    operands: list[Value] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)
    attrs: dict = field(default_factory=dict)
    regions: list[list[Block]] = field(default_factory=list)
    successors: list[tuple[str, list[Value]]] = field(default_factory=list)
    place: str = ""


@dataclass(eq=False)
class Block:
    """Operations in order; the last one ends the block."""

    label: str
    args: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


@dataclass(eq=False)
class Function:
    """A kernel; `names` are those of its arguments in the source."""

    name: str
    args: list[Value]
    blocks: list[Block]
    names: list[str] = field(default_factory=list)


# Operations with a region that is a function of scalars, not code of the program.
COMBINING = {"tt.reduce", "tt.scan", "tt.map_elementwise"}


def walk(blocks: list[Block]) -> Iterator[Op]:
    """All operations of the program, in order, with those of inner regions."""
    for block in blocks:
        for op in block.ops:
            yield op
            if op.name not in COMBINING:
                for region in op.regions:
                    yield from walk(region)


def matched(pattern: str, text: str) -> re.Match[str]:
    """The match at the beginning of a text; NotImplementedError where its form is not known."""
    if not (found := re.match(pattern, text)):
        raise NotImplementedError(f"the form of {text!r}")
    return found


_TYPES: dict[str, Type] = {}


def parse_type(text: str) -> Type:
    """The type that MLIR prints as `text`, such as "tensor<4x8x!tt.ptr<f32>>"."""
    text = text.strip()
    if text not in _TYPES:
        _TYPES[text] = _parse_type(text)
    return _TYPES[text]


def _parse_type(text: str) -> Type:
    if text.startswith("tensor<"):
        sizes, elem = matched(r"((?:\d+x)*)(.*)$", text[7:-1]).groups()
        return parse_type(elem).with_sizes(tuple(int(n) for n in sizes.split("x") if n))
    if text.startswith("!tt.ptr<"):
        # A second number is an address space.
        return Type("ptr", None, parse_type(re.sub(r",\s*\d+$", "", text[8:-1])))
    return Type("i64" if text == "index" else text)
