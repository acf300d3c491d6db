"""Control flow: scf.for, scf.if and scf.while as C, branches between blocks as goto.

What control flow hands on (arguments of blocks, results of regions) are variables and arrays, which
are assigned all at once. Before another block begins all that it may want is in its array.
"""

from __future__ import annotations

from .elements import UNSIGNED, held
from .generator import Generator, handles
from .index import Indices, linear
from .ir import Op, Value
from .loop import Loop
from .scalars import VIEWS


@handles("scf.for")
def for_loop(g: Generator, op: Op) -> None:
    lower, upper, step, *inits = op.operands
    (body,) = op.regions[0]
    counter, *args = body.args
    g.settle()
    for value in body.args:
        g.declare(value)
    assign(g, args, inits)
    kind = UNSIGNED[counter.type.elem] if op.attrs["unsigned"] else held(counter.type)
    q = f"q_{counter.name}"
    bound = f"{q} < ({kind}){upper.name}"
    g.emit(f"for ({kind} {q} = {lower.name}; {bound}; {q} += {step.name})")
    g.targets.append(("for", args, args))
    with g.scope():
        g.emit(f"{counter.name} = {q};")
        g.write_block(body)
    g.targets.pop()
    # The results of a loop are its arguments after it.
    for result, arg in zip(op.results, args, strict=True):
        if result.type.is_tensor:
            _share(g, result, arg)
        else:
            g.assign(result, arg.name)


@handles("scf.if")
def branch(g: Generator, op: Op) -> None:
    g.settle()
    for result in op.results:
        g.declare(result)
    g.targets.append(("if", op.results, op.results))
    for head, region in zip((f"if ({op.operands[0].name})", "else"), op.regions, strict=False):
        g.emit(head)
        with g.scope():
            g.write_block(region[0])
    g.targets.pop()


@handles("scf.while")
def while_loop(g: Generator, op: Op) -> None:
    (before,), (after,) = op.regions
    g.settle()
    for value in before.args:
        g.declare(value)
    passed = before.ops[-1].operands[1:]
    for value, given in zip((*after.args, *op.results), (*passed, *passed), strict=True):
        if value.type.is_tensor and given in before.args:  # handed on as it is
            _share(g, value, given)
        else:
            g.declare(value)
    assign(g, before.args, op.operands)
    g.emit("while (1)")
    with g.scope():
        g.targets.append(("while", op.results, after.args))
        g.write_block(before)
        g.targets[-1] = ("for", before.args, before.args)
        g.write_block(after)
        g.targets.pop()


def _share(g: Generator, value: Value, other: Value) -> None:
    g.arrays[value] = g.arrays[other]
    g.aliases[value] = other


@handles("scf.condition")
def condition(g: Generator, op: Op) -> None:
    goes_on, *values = op.operands
    _, results, args = g.targets[-1]
    g.materialize(values)
    g.emit(f"if (!{goes_on.name}) {{")
    assign(g, results, values)
    g.emit("break; }")
    assign(g, args, values)


@handles("scf.yield")
def hand_over(g: Generator, op: Op) -> None:
    assign(g, g.targets[-1][1], op.operands)


@handles("cf.br", "cf.cond_br")
def jump(g: Generator, op: Op) -> None:
    g.settle()
    for _, values in op.successors:
        g.materialize(values)
    heads = [f"if ({op.operands[0].name})", "else"] if op.operands else [""]
    for head, (label, values) in zip(heads, op.successors, strict=True):
        block = next(block for block in g.function.blocks if block.label == label)
        g.emit(f"{head} {{")
        assign(g, block.args, values)
        g.emit(f"goto L_{label}; }}")


@handles("tt.call")
def call(g: Generator, op: Op) -> None:
    g.settle_loads()
    given = "".join(f", {operand.name}" for operand in op.operands)
    e = f"{g.callees[op.attrs['callee']]}(run, pid{given})"
    if op.results:
        g.assign(op.results[0], e)
    else:
        g.emit(f"{e};")


# ---------------------------------------------------------------------- assigning at once
def assign(g: Generator, targets: list[Value], values: list[Value]) -> None:
    """Give variables and arrays their new values, none of which sees another's new one."""
    pairs = [(t, v) for t, v in zip(targets, values, strict=True) if t is not v]
    _assign_tensors(g, [
        (t, v) for t, v in pairs if t.type.is_tensor and g.arrays[t] != g.arrays.get(v)
    ])  # fmt: skip
    scalars = [(t, v) for t, v in pairs if not t.type.is_tensor]
    if len(scalars) == 1:
        g.emit(f"{scalars[0][0].name} = {scalars[0][1].name};")
    elif scalars:
        names = [g.temp("g") for _ in scalars]
        both = list(zip(names, scalars, strict=True))
        g.emit("{", *(f"{held(t.type)} {name} = {v.name};" for name, (t, v) in both))
        g.emit(*(f"{t.name} = {name};" for name, (t, _) in both), "}")


def _assign_tensors(g: Generator, pairs: list[tuple[Value, Value]]) -> None:
    if not pairs:
        return
    assigned = {target for target, _ in pairs}
    one_loop = len({target.type.shape for target in assigned}) == 1
    if one_loop and all(_reads_own_element(g, v, assigned, t.type.shape) for t, v in pairs):
        _copy(g, [(g.arrays[target], value) for target, value in pairs])
        return
    copies = [g.new_array(target.type) for target, _ in pairs]
    for copy, (_, value) in zip(copies, pairs, strict=True):
        _copy(g, [(copy, value)])
    for copy, (target, _) in zip(copies, pairs, strict=True):
        g.emit(f"memcpy({g.arrays[target]}, {copy}, sizeof({copy}));")


def _copy(g: Generator, pairs: list[tuple[str, Value]]) -> None:
    """Fill arrays of one shape in one loop, every element when all are known."""
    shape = pairs[0][1].type.shape

    def write(loop: Loop, idx: Indices) -> None:
        found = [(array, g.element(loop, value, idx)) for array, value in pairs]
        at = linear(shape, idx).c()
        loop.body += [f"{array}[{at}] = {e};" for array, e in found]

    g.run_loop(shape, write)


def _reads_own_element(g: Generator, value: Value, assigned: set[Value], shape: tuple) -> bool:
    """An element of the value reads the assigned arrays at its own index only."""

    def root(v: Value) -> Value:
        while v in g.aliases:
            v = g.aliases[v]
        return v

    def reads(v: Value) -> bool:
        if root(v) in assigned:
            return True
        if v in g.arrays or v.op is None or not v.type.is_tensor:
            return False
        return any(reads(operand) for operand in v.op.operands)

    def own(v: Value) -> bool:
        if not v.type.is_tensor:
            return True
        if root(v) in assigned:
            return v.type.shape == shape
        if v in g.arrays or v.op is None:
            return True
        if v.op.name in VIEWS | {"tt.join", "tt.split", "tt.gather", "tt.load"}:
            return not any(reads(operand) for operand in v.op.operands)
        return all(own(operand) for operand in v.op.operands)

    return own(value)
