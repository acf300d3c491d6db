"""Which values of a function get arrays, and which pointers lead to which arguments.

An elementwise value is computed anew in every loop that needs it unless that costs much: then it is
kept in an array. So is a load that several loops need, or one that another block needs.
"""

from __future__ import annotations

from collections import defaultdict

from .index import reshapes_linearly
from .ir import Block, Function, Op, Value, walk
from .scalars import FREE, cost, is_elementwise

DEAR = 6  # additions


class Plan:
    """What is known of a function before code is written.

    Attributes:
        kept: values that get an array when they are first needed.
    """

    def __init__(self, function: Function) -> None:
        self.kept: set[Value] = set()
        self._rows: dict[tuple[Op, Value], bool] = {}
        ops = list(walk(function.blocks))
        self._costs: dict[Value, int] = defaultdict(int)
        for op in ops:
            for result in op.results:
                if result.type.is_tensor:
                    self._costs[result] = self._cost(op)
        readers: dict[Value, set] = defaultdict(set)
        for op in reversed(ops):
            for result in op.results:
                if result.type.is_tensor:
                    readers[result] = self._readers(result, readers)
                    if self._is_kept(op, result, readers[result]):
                        self.kept.add(result)
                        self._costs[result] = 1

    def _cost(self, op: Op) -> int:
        if op.name == "tt.load":
            return 3
        if not is_elementwise(op):
            return 0
        return min(cost(op) + sum(self._costs[operand] for operand in op.operands), 10**6)

    def _readers(self, value: Value, readers: dict[Value, set]) -> set[tuple[object, Block]]:
        """What will read the value's elements, with its block: loops, arrays, other values."""
        found: set[tuple[object, Block]] = set()
        for use in value.uses:
            if not (is_elementwise(use) and use.results[0].type.is_tensor):
                found.add((use, use.block))
            elif self.needs_array(use, value):
                found.add(((use, "array"), use.block))
            else:
                for result in use.results:
                    if result in self.kept:
                        found.add((result, use.block))
                    else:
                        found |= readers[result]
        return found

    def _is_kept(self, op: Op, value: Value, readers: set[tuple[object, Block]]) -> bool:
        outside = any(block is not value.block for _, block in readers)
        arrays = [reader for reader, _ in readers if isinstance(reader, tuple)]
        if op.name == "tt.load":
            return len(readers) > 1 or outside or bool(arrays)
        if any(use in value.uses for use, _ in arrays):
            return is_elementwise(op)
        if not is_elementwise(op) or op.name in FREE:
            return False
        return (len(readers) > 1 and self._costs[value] > DEAR) or (
            outside and self._costs[value] > 3
        )

    def needs_array(self, use: Op, value: Value) -> bool:
        """The operation reads elements in another order, or a row again for each of many."""
        if use.name == "tt.gather":
            return use.operands[0] is value
        if use.name == "tt.reshape":
            return not reshapes_linearly(value.type.shape, use.results[0].type.shape)
        if use.name != "tt.broadcast":
            return False
        if (use, value) not in self._rows:  # kept, it would cost nothing
            many = value.type.numel < use.results[0].type.numel
            self._rows[use, value] = value.type.shape[-1] > 1 and many and self._costs[value] > 2
        return self._rows[use, value]


def origins(function: Function) -> dict[Value, frozenset[int] | None]:
    """Pointer -> the arguments that its address may be computed from; None: also others.

    Addresses that are loaded, or made of integers, belong to no argument.
    """
    found: dict[Value, set[int] | None] = {
        arg: {k} for k, arg in enumerate(function.args) if arg.type.elem == "ptr"
    }
    sources: dict[Value, list[Value]] = defaultdict(list)
    for op in walk(function.blocks):
        for target, source in _handed_on(op, function):
            sources[target].append(source)
        for result in op.results:
            if result.type.elem != "ptr":
                continue
            if op.name in ("tt.load", "tt.int_to_ptr", "arith.constant"):
                found[result] = None
            elif not op.regions:
                sources[result] += [o for o in op.operands if o.type.elem == "ptr"]
    changed = True
    while changed:
        changed = False
        for target, given in sources.items():
            if found.get(target, ()) is None:
                continue
            known = [found[source] for source in given if source in found]
            whole = [each for each in known if each is not None]
            new = set().union(*whole) if len(whole) == len(known) else None
            if known and new != found.get(target):
                found[target], changed = new, True
    return {value: None if each is None else frozenset(each) for value, each in found.items()}


def _handed_on(op: Op, function: Function) -> list[tuple[Value, Value]]:
    """(variable, value) wherever control flow assigns values to arguments or results."""
    pairs: list[tuple[Value, Value]] = []
    for label, values in op.successors:
        block = next(block for block in function.blocks if block.label == label)
        pairs += zip(block.args, values, strict=True)
    if op.name == "scf.for":
        (body,) = op.regions[0]
        pairs += zip(body.args[1:], op.operands[3:], strict=True)
        pairs += zip(body.args[1:], _yielded(body), strict=False)
        pairs += zip(op.results, body.args[1:], strict=True)
    elif op.name == "scf.if":
        for (block,) in op.regions:
            pairs += zip(op.results, _yielded(block), strict=False)
    elif op.name == "scf.while":
        (before,), (after,) = op.regions
        passed = before.ops[-1].operands[1:]
        pairs += zip(before.args, op.operands, strict=True)
        pairs += zip(before.args, _yielded(after), strict=True)
        pairs += zip(after.args, passed, strict=True)
        pairs += zip(op.results, passed, strict=True)
    return [(target, value) for target, value in pairs if target.type.elem == "ptr"]


def _yielded(block: Block) -> list[Value]:
    """What a region hands on at its end; a yield of nothing is not printed."""
    return block.ops[-1].operands if block.ops and block.ops[-1].name == "scf.yield" else []
