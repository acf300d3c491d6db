"""What writes the code of one program: values in loops and arrays, and the order of effects.

A scalar is a C local. A tensor is lazy: elementwise operations are written, as scalars, into the
loop of whatever needs their elements (a store, a reduction, ...). An array is filled for what
`plan` keeps, for what leaves its block, and for loads that a later write or the end of the block
would overtake: all loads of an operation are done before any write that comes after it.

Handlers of operations with effects, regions or loops of their own are in `memory`, `reductions`,
`scans`, `tensors` and `control`; they register themselves with `handles`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from .addresses import prefix
from .elements import NARROW, SIZES, held
from .index import ZERO, Index, Indices, depends, keys, linear, through_view
from .ir import Block, Function, Op, Type, Value
from .loop import Loop
from .plan import Plan, origins
from .scalars import VIEWS, expression, is_elementwise

Handler = Callable[["Generator", Op], None]
HANDLERS: dict[str, Handler] = {}
# Of one thread they order nothing.
_WITHOUT_EFFECT = {"gpu.barrier", "ttg.barrier", "ttg.local_barrier", "llvm.intr.assume"}
# What a stack holds; larger arrays are the thread's.
_LARGE = 1 << 16


class Unsupported(NotImplementedError):
    """Says which kernel has what this backend does not know, and where."""


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register the decorated function for operations of these names."""

    def decorate(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return decorate


class Generator:
    """The code of a function.

    Args:
        bounds: check every access of memory against the tensor that its pointer comes from.
        callees: C names of the functions that it may call.
        places: those of the kernel, for a function that it calls.

    Attributes:
        arrays: values whose elements are in an array, with its name.
        pending: values of the current block that will get an array: what `plan` keeps, and loads.
        aliases: values that share the array of another.
        targets: what the yields of the regions around the code assign to.
        places: places in the kernel's source that checks name.
    """

    def __init__(
        self,
        function: Function,
        *,
        bounds: bool = False,
        callees: dict[str, str] | None = None,
        places: dict[str, int] | None = None,
    ) -> None:
        self.function, self.bounds, self.callees = function, bounds, callees or {}
        self.plan = Plan(function)
        self.origins = origins(function) if bounds else {}
        self.arrays: dict[Value, str] = {}
        self.pending: dict[Value, None] = {}
        self.aliases: dict[Value, Value] = {}
        self.targets: list[tuple[str, list[Value], list[Value]]] = []
        self.places: dict[str, int] = {} if places is None else places
        self.block: Block = function.blocks[0]
        self.lines: list[str] = []
        self.declared: list[str] = []
        self.scopes: list[list[str]] = [[]]
        self.temps = self.loops = 0

    def c_function(self, name: str) -> str:
        """The C function, which runs the function for one program of the grid."""
        blocks = self.function.blocks
        for block in blocks[1:]:
            for arg in block.args:
                self.declare(arg)
        for block in blocks:
            if len(blocks) > 1:
                self.emit(f"L_{block.label}: ;")
            self.write_block(block)
        lines = [*self.declared, *self.scopes[0], *self.lines]
        head = prototype(self.function, name, names=True) + " {"
        if any("tc_one" in line for line in lines):
            lines.insert(0, "TC_ONE;")
        return "\n".join([head, *lines, "}"])

    # -- operations
    def write_block(self, block: Block) -> None:
        outer, pending, known = self.block, self.pending, set(self.arrays)
        self.block, self.pending = block, {}
        for op in block.ops:
            try:
                self.write_op(op)
            except Unsupported:
                raise
            except NotImplementedError as error:
                raise Unsupported(f"{self.function.name} ({op.place}): {error}") from error
        # An array that was filled here for a value of another block is not filled on other ways.
        for value in [v for v in self.arrays if v not in known and v.block is not block]:
            del self.arrays[value]
        self.block, self.pending = outer, pending

    def write_op(self, op: Op) -> None:
        if op.name in HANDLERS:
            HANDLERS[op.name](self, op)
        elif op.name in _WITHOUT_EFFECT:
            pass
        elif not is_elementwise(op):
            raise NotImplementedError(f"the operation {op.name}")
        elif op.results[0].type.is_tensor:
            self.materialize(o for o in op.operands if self.plan.needs_array(op, o))
            self.pending.update(dict.fromkeys(r for r in op.results if r in self.plan.kept))
        elif op.name == "tt.unsplat":
            source = op.operands[0]
            self.declare(op.results[0])
            self.run_loop((), lambda loop, idx: loop.body.append(
                f"{op.results[0].name} = "
                f"{self.element(loop, source, tuple(ZERO for _ in source.type.shape))};"
            ))  # fmt: skip
        else:
            self.assign(op.results[0], expression(op, [o.name for o in op.operands], op.results[0]))

    # -- lines, names, variables
    def emit(self, *lines: str) -> None:
        self.lines += lines

    def temp(self, stem: str = "t") -> str:
        self.temps += 1
        return f"{stem}{self.temps}"

    def place(self, op: Op) -> int:
        """The number of an operation's place in the source."""
        return self.places.setdefault(op.place, len(self.places))

    def assign(self, value: Value, e: str) -> None:
        self.declared.append(f"{held(value.type)} {value.name};")
        self.emit(f"{value.name} = {e};")

    def declare(self, value: Value) -> None:
        """A variable that is assigned at several places, or in a loop."""
        if value.type.is_tensor:
            self.arrays[value] = self.new_array(value.type, f"a_{value.name}")
        else:
            self.declared.append(f"{held(value.type)} {value.name};")

    def new_array(self, type: Type, name: str = "") -> str:
        name = name or self.temp("a")
        size = type.numel * max(SIZES[type.elem], 4 if type.elem in NARROW else 1)
        kind = "static __thread " if size > _LARGE else ""
        declaration = f"{kind}{held(type)} {name}[{type.numel}] __attribute__((aligned(64)));"
        self.scopes[-1].append(declaration)
        return name

    def at(self, value: Value, idx: Indices) -> str:
        """An element of a value's array, as a C lvalue."""
        return f"{self.arrays[value]}[{linear(value.type.shape, idx).c()}]"

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Braces, with arrays of their own that are not known after them."""
        lines, known = self.lines, set(self.arrays)
        self.lines = []
        self.scopes.append([])
        yield
        for value in [v for v in self.arrays if v not in known]:
            del self.arrays[value]
        inner, self.lines = self.lines, lines
        self.emit("{", *self.scopes.pop(), *inner, "}")

    # -- elements
    def element(self, loop: Loop, value: Value, idx: Indices) -> str:
        """C expression of an element in a loop; adds its lines at the level where they belong."""
        if not value.type.is_tensor:
            return value.name
        key = loop.key(value, idx)
        if known := loop.fixed.get(key) or loop.memo.get(key):
            return known
        lines, consumed = loop.lines_at(idx), len(loop.consumed)
        in_array = value in self.arrays
        e = self.at(value, idx) if in_array else self.compute(loop, value, idx)
        if in_array or not (re.fullmatch(r"[\w.]+", e) or value.maker == "arith.constant"):
            name = self.temp("e")
            lines.append(f"{held(value.type)} {name} = {e};")
            e = name
        loop.memo[key] = e
        if not in_array:
            self.used(loop, value, idx, e, loop.consumed[consumed:])
        return e

    def used(self, loop: Loop, value: Value, idx: Indices, e: str, sources: list[Value]) -> None:
        """A pending value was computed in a loop: if all of it was, keep it where it is wanted."""
        if value not in self.pending:
            return
        if value not in self.plan.kept:
            loop.consumed.append(value)
            return
        loop.sources[value] += sources
        if value.type.shape == loop.shape and keys(idx) == keys(loop.index):
            self.keep(loop, value, e)

    def keep(self, loop: Loop, value: Value, e: str) -> None:
        """Fill an array on the way, in a loop over all of a value's elements."""
        loop.stored.add(value)
        array = loop.keep.get(value)
        if array is None:
            array = loop.keep[value] = self.new_array(value.type)
        loop.body.append(f"{array}[{linear(value.type.shape, loop.index).c()}] = {e};")

    def compute(self, loop: Loop, value: Value, idx: Indices) -> str:
        """C expression of an element that is in no array."""
        op = value.op
        if op is not None and op.name in COMPUTED:
            return COMPUTED[op.name](self, loop, op, idx, value)
        if op is None or not is_elementwise(op):
            raise NotImplementedError(f"elements of {op.name if op else 'an argument'}")
        return expression(op, [self.element(loop, o, idx) for o in op.operands], value)

    # -- loops
    def run_loop(
        self,
        shape: tuple[int, ...],
        write: Callable[[Loop, Indices], None],
        *,
        pragma: str = "GCC ivdep",
        splits: bool = True,
        only: Value | None = None,
        setup: Callable[[Loop], None] | None = None,
        finish: Callable[[Loop], None] | None = None,
    ) -> None:
        """Write a loop nest over `shape`.

        Args:
            write: adds the lines of an element to `loop.body`, given the loop and the index.
            splits: whether the innermost loop may be split where a mask ends.
            only: where this mask is false there is nothing to do.
            setup, finish: called before and after; they add to `loop.pre` and `loop.post`.
        """
        mask = self._splitting_mask(shape, write) if splits and shape and shape[-1] >= 8 else None
        self.loops += 1
        loop = Loop(shape, self.loops)
        end = str(shape[-1]) if shape else "1"
        if mask is not None:
            lanes = self.temp("n")
            count = f"(int)tc_clamp({prefix(self, loop, *mask)}, {end}L)"
            loop.pre[loop.rank - 1].append(f"int {lanes} = {count};")
        if setup:
            setup(loop)
        filled = []
        if mask is None:
            write(loop, loop.index)
            loop.end_part("0", end)
            filled.append(loop.stored)
        else:
            value, idx = mask
            for given, start, stop in (("1", "0", lanes), ("0", lanes, end)):
                loop.begin_part()
                loop.fixed = {loop.key(value, idx): given}
                # Arrays that are filled on the way need all lanes.
                if given == "0" and only is value and not loop.keep:
                    break
                write(loop, loop.index)
                loop.end_part(start, stop)
                filled.append(loop.stored)
        if finish:
            finish(loop)
        lines = loop.render(pragma)
        self.emit(*(["{", *lines, "}"] if loop.rank or len(lines) > 1 else lines))
        # An array that one part of the loop has not filled is not used.
        whole = {v: array for v, array in loop.keep.items() if all(v in each for each in filled)}
        self.arrays.update(whole)
        # What is wanted and not in its array reads its loads again.
        again = {load for v, loads in loop.sources.items() if v not in whole for load in loads}
        for value in (*whole, *loop.consumed):
            if value not in again:
                self.pending.pop(value, None)

    def _splitting_mask(self, shape, write) -> tuple[Value, Indices] | None:
        """The first mask that lets a prefix of the innermost loop through, found by a trial run.

        The loop that is written next has the same variables.
        """
        before = self.temps, self.loops, [list(scope) for scope in self.scopes]
        loop = Loop(shape, self.loops + 1)
        write(loop, loop.index)
        found = next(
            (m for m in loop.masks if depends(m[1], loop.inner) and prefix(self, loop, *m)), None
        )
        self.temps, self.loops, scopes = before
        for scope, kept in zip(self.scopes, scopes, strict=True):
            scope[:] = kept
        return found

    # -- arrays
    def materialize(self, values: Iterable[Value]) -> None:
        """Fill the arrays of tensors; those of one shape share a loop."""
        shapes: dict[tuple, dict[Value, None]] = defaultdict(dict)
        for value in values:
            if value.type.is_tensor and value not in self.arrays:
                shapes[value.type.shape][value] = None
        for shape, group in shapes.items():
            # The loop of another shape may have filled some.
            wanted = [value for value in group if value not in self.arrays]
            if not wanted:
                continue
            self.plan.kept.update(wanted)
            self.pending.update(dict.fromkeys(wanted))

            def write(loop: Loop, idx: Indices, wanted=wanted) -> None:
                for value in wanted:
                    e = self.element(loop, value, idx)
                    if value not in loop.stored:
                        self.keep(loop, value, e)

            self.run_loop(shape, write)

    def settle_loads(self) -> None:
        """Before memory changes: no load is done later than where it stands."""
        self.materialize([v for v in self.pending if v.maker == "tt.load"])

    def settle(self) -> None:
        """Before another block begins: what is wanted there has its array."""
        self.materialize(list(self.pending))


def prototype(function: Function, name: str, names: bool = False) -> str:
    """Head of a function in C, whose result is that of all its returns."""
    ends = [block.ops[-1] for block in function.blocks if block.ops[-1].name == "tt.return"]
    types = [value.type for value in ends[0].operands]
    if len(types) > 1 or any(type.is_tensor for type in [*types, *(a.type for a in function.args)]):
        raise Unsupported(f"{function.name}: a function with tensors that is not inlined")
    kept = "".join(f", {held(a.type)}{f' {a.name}' * names}" for a in function.args)
    result = held(types[0]) if types else "void"
    return f"static {result} {name}(const tc_run *run, const int32_t *pid{kept})"


# ---------------------------------------------------------------------- elements of operations
def _view(g: Generator, loop: Loop, op: Op, idx: Indices, value: Value) -> str:
    return g.element(loop, op.operands[0], through_view(op, idx))


def _range(g: Generator, loop: Loop, op: Op, idx: Indices, value: Value) -> str:
    return f"(int32_t)({(idx[0] + Index((), int(op.attrs['start']))).c()})"


def _join(g: Generator, loop: Loop, op: Op, idx: Indices, value: Value) -> str:
    last = idx[-1]
    if not last.terms:
        return g.element(loop, op.operands[last.const], idx[:-1])
    a, b = (g.element(loop, operand, idx[:-1]) for operand in op.operands)
    return f"(({last.c()}) ? {b} : {a})"


def _split(g: Generator, loop: Loop, op: Op, idx: Indices, value: Value) -> str:
    return g.element(loop, op.operands[0], (*idx, Index((), value.index)))


def _gather(g: Generator, loop: Loop, op: Op, idx: Indices, value: Value) -> str:
    source, index = op.operands
    at, axis = g.element(loop, index, idx), int(op.attrs["axis"])
    shape = source.type.shape
    rest = linear(shape, (*idx[:axis], ZERO, *idx[axis + 1 :])).c()
    stride = Type("i8", shape[axis + 1 :]).numel
    return f"{g.arrays[source]}[{rest} + (long){at}*{stride}]"


Computed = Callable[[Generator, Loop, Op, Indices, Value], str]
# `memory` adds the load.
COMPUTED: dict[str, Computed] = {
    **dict.fromkeys(VIEWS, _view),
    "tt.make_range": _range, "tt.join": _join, "tt.split": _split, "tt.gather": _gather,
}  # fmt: skip
