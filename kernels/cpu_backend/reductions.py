"""tt.reduce: along the last axis, by one operation or by any rule; along another axis."""

from __future__ import annotations

from .elements import NARROW, UNSIGNED, held, neutral, rounded
from .generator import Generator, handles
from .index import ZERO, Indices, linear
from .ir import Block, Op
from .loop import Loop
from .scalars import expression, is_elementwise

_SIGNS = {"add": "+", "mul": "*", "and": "&", "or": "|", "xor": "^", "max": ">", "min": "<"}
# NumPy sums up to this many in order: equal sums then tie where its do.
_IN_ORDER = 128


@handles("tt.reduce")
def reduce(g: Generator, op: Op) -> None:
    shape, axis = op.operands[0].type.shape, int(op.attrs["axis"])
    rule = op.regions[0][0]
    operation = single_operation(rule)
    for result in op.results:
        g.declare(result)
    if axis != len(shape) - 1:
        _across_rows(g, op, axis, rule)
    elif len(op.operands) == 1 and operation:
        _by_operation(g, op, operation)
    else:
        _by_halves(g, op, rule)


def single_operation(rule: Block) -> str | None:
    """The name of the arith operation, if a rule is nothing but one on its two arguments."""
    if len(rule.ops) != 2 or len(rule.args) != 2:
        return None
    op, returned = rule.ops
    dialect, _, name = op.name.partition(".")
    stem = name.rstrip("fi").removesuffix("num").removesuffix("imum")
    known = dialect == "arith" and stem.rstrip("su") in _SIGNS
    whole = returned.operands == op.results and set(op.operands) == set(rule.args)
    return name if known and whole else None


def combine(g: Generator, rule: Block, args: list[str], lines: list[str]) -> list[str]:
    """Add the lines of a rule, applied to C expressions; returns what it returns."""
    names = dict(zip(rule.args, args, strict=True))
    for op in rule.ops[:-1]:
        if not is_elementwise(op):
            raise NotImplementedError(f"the operation {op.name} in a reduction or scan")
        (result,) = op.results
        name = g.temp("c")
        given = [names.get(operand, operand.name) for operand in op.operands]
        lines.append(f"{held(result.type)} {name} = {expression(op, given, result)};")
        names[result] = name
    return [names.get(operand, operand.name) for operand in rule.ops[-1].operands]


def _target(g: Generator, op: Op, k: int, idx: Indices) -> str:
    result = op.results[k]
    return g.at(result, idx) if result.type.is_tensor else result.name


def _by_operation(g: Generator, op: Op, operation: str) -> None:
    """One accumulator a row, which the compiler may make a vector of."""
    source = op.operands[0]
    elem, shape = source.type.elem, source.type.shape
    stem = operation.rstrip("fi").removesuffix("num").removesuffix("imum").rstrip("su")
    acc, seen = g.temp("acc"), g.temp("ok")
    # maxnum and minnum give NaN only if all are, maximum and minimum if any is.
    counts = {"n": "==", "i": "!="}.get(operation[3]) if stem in ("max", "min") else None
    counts = counts if operation.endswith("f") else None

    def setup(loop: Loop) -> None:
        lines = loop.pre[loop.rank - 1]
        lines.append(f"{held(source.type)} {acc} = {neutral(operation, elem)};")
        if counts:
            lines.append(f"int {seen} = 0;")

    def write(loop: Loop, idx: Indices) -> None:
        e = g.element(loop, source, idx)
        if stem not in ("max", "min"):
            # The sum of one bit wraps.
            sign = "^" if elem == "i1" and stem == "add" else _SIGNS[stem]
            loop.body.append(f"{acc} = {acc} {sign} {e};")
            return
        cast = f"({UNSIGNED[elem]})" if operation.endswith("ui") else ""
        sign = "-" if elem == "i1" and not cast else ""
        loop.body.append(f"{acc} = {cast}{sign}{e} {_SIGNS[stem]} {cast}{sign}{acc} ? {e} : {acc};")
        if counts:
            loop.body.append(f"{seen} |= ({e} {counts} {e});")

    def finish(loop: Loop) -> None:
        lines = loop.post[loop.rank - 1]
        if counts:
            lines.append(f"if ({'!' * (counts == '==')}{seen}) {acc} = NAN;")
        lines.append(f"{_target(g, op, 0, loop.index[:-1])} = {rounded(elem, acc)};")

    ordered = elem == "f64" and shape[-1] <= _IN_ORDER and stem == "add"
    pragma = "GCC ivdep"
    if not (ordered or elem == "i1" or operation.endswith("ui")):
        joined = stem if stem in ("max", "min") else _SIGNS[stem]
        pragma = f"omp simd reduction({joined}:{acc})" + f" reduction(|:{seen})" * bool(counts)
    g.run_loop(shape, write, setup=setup, finish=finish, pragma=pragma)


def _by_halves(g: Generator, op: Op, rule: Block) -> None:
    """Any rule on any number of operands: the second half onto the first, on copies of a row."""
    shape = op.operands[0].type.shape
    copies = [g.new_array(source.type.with_sizes(shape[-1:])) for source in op.operands]
    halves = _halves(g, op, rule, copies, shape[-1])
    if len(shape) == 1:

        def write(loop: Loop, idx: Indices) -> None:
            for source, copy in zip(op.operands, copies, strict=True):
                loop.body.append(f"{copy}[{idx[0].c()}] = {g.element(loop, source, idx)};")

        g.run_loop(shape, write)
        g.emit("{", *halves, "}")
        for result, copy in zip(op.results, copies, strict=True):
            g.emit(f"{result.name} = {copy}[0];")
        return
    g.materialize(op.operands)
    g.loops += 1
    rows = Loop(shape[:-1], g.loops)
    for source, copy in zip(op.operands, copies, strict=True):
        row = linear(shape, (*rows.index, ZERO)).c()
        rows.body.append(f"memcpy({copy}, {g.arrays[source]} + {row}, sizeof({copy}));")
    rows.body += halves
    for k, copy in enumerate(copies):
        rows.body.append(f"{_target(g, op, k, rows.index)} = {copy}[0];")
    rows.end_part("0", str(shape[-2]))
    g.emit(*rows.render("GCC unroll 1"))


def _halves(g: Generator, op: Op, rule: Block, copies: list[str], n: int) -> list[str]:
    """Lines that leave the result in the first element of each copy."""
    inner, args = [], []
    for half in ("i", "i + s"):
        for source, copy in zip(op.operands, copies, strict=True):
            args.append(g.temp("x"))
            inner.append(f"{held(source.type)} {args[-1]} = {copy}[{half}];")
    found = combine(g, rule, args, inner)
    inner += [f"{copy}[i] = {e};" for copy, e in zip(copies, found, strict=True)]
    return [
        f"for (int s = {n // 2}; s > 0; s >>= 1) {{",
        "#pragma omp simd",
        "for (int i = 0; i < s; i++) {",
        *inner, "}", "}",
    ]  # fmt: skip


def _across_rows(g: Generator, op: Op, axis: int, rule: Block) -> None:
    """Along an axis that is not the last: rows of accumulators, that the first row fills."""
    elem = op.results[0].type.elem
    # Sums of narrow floats are rounded once, at the end.
    sums = elem in NARROW and single_operation(rule) == "addf"

    def write(loop: Loop, idx: Indices) -> None:
        at = (*idx[:axis], *idx[axis + 1 :])
        xs = [g.element(loop, source, idx) for source in op.operands]
        accs = []
        for result in op.results:
            accs.append(g.temp("x"))
            loop.body.append(f"{held(result.type)} {accs[-1]} = {g.at(result, at)};")
        total = [f"({accs[0]} + {xs[0]})"]
        found = total if sums else combine(g, rule, accs + xs, loop.body)
        for result, e, x in zip(op.results, found, xs, strict=True):
            loop.body.append(f"{g.at(result, at)} = ({idx[axis].c()}) == 0 ? {x} : {e};")

    # What the first row is combined with is not used, but must be there.
    for result in op.results:
        g.emit(f"memset({g.arrays[result]}, 0, sizeof({g.arrays[result]}));")
    g.run_loop(op.operands[0].type.shape, write)
    if sums:
        array, n = g.arrays[op.results[0]], op.results[0].type.numel
        g.emit(f"for (int i = 0; i < {n}; i++) {array}[i] = {rounded(elem, f'{array}[i]')};")
