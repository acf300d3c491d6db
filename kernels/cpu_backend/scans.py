"""tt.scan: in order along an axis, by any rule."""

from __future__ import annotations

from .elements import held
from .generator import Generator, handles
from .index import Index, linear
from .ir import Op
from .loop import Loop
from .reductions import combine


@handles("tt.scan")
def scan(g: Generator, op: Op) -> None:
    shape, axis = op.operands[0].type.shape, int(op.attrs["axis"])
    reverse = op.attrs.get("reverse") == "true"
    g.materialize(op.operands)
    for result in op.results:
        g.declare(result)
    g.loops += 1
    loop = Loop(shape, g.loops)
    along, n = loop.vars[axis], shape[axis]
    first, second, stop = (n - 1, n - 2, -1) if reverse else (0, 1, n)
    sign, step = (">", "--") if reverse else ("<", "++")
    running = axis == len(shape) - 1
    lines = []
    for var, size in zip(loop.vars, shape, strict=True):
        if var != along:
            lines.append(f"for (int {var} = 0; {var} < {size}; {var}++) {{")
            continue
        if running:
            at = linear(shape, (*loop.index[:-1], Index((), first))).c()
            for k, (source, result) in enumerate(zip(op.operands, op.results, strict=True)):
                lines.append(f"{held(result.type)} s{k} = {g.arrays[source]}[{at}];")
                lines.append(f"{g.arrays[result]}[{at}] = s{k};")
        start = second if running else first
        lines.append(f"for (int {var} = {start}; {var} {sign} {stop}; {var}{step}) {{")
    write = _with_running_values if running else _after_the_row_before
    lines += write(g, op, loop, first, step)
    g.emit("{", *lines, *["}"] * loop.rank, "}")


def _with_running_values(g: Generator, op: Op, loop: Loop, first: int, step: str) -> list[str]:
    """Along the last axis: s0, s1, ... hold the results so far."""
    lines: list[str] = []
    names = [f"s{k}" for k in range(len(op.results))]
    xs = [g.at(source, loop.index) for source in op.operands]
    found = combine(g, op.regions[0][0], [*names, *xs], lines)
    for result, e in zip(op.results, found, strict=True):
        lines.append(f"{g.at(result, loop.index)} = {e};")
    # Only when all are computed.
    lines += [f"{name} = {g.at(result, loop.index)};"
              for name, result in zip(names, op.results, strict=True)]  # fmt: skip
    return lines


def _after_the_row_before(g: Generator, op: Op, loop: Loop, first: int, step: str) -> list[str]:
    """Along another axis: the row before is in the results."""
    axis = int(op.attrs["axis"])
    shift = Index((), 1 if step == "--" else -1)
    before = (*loop.index[:axis], loop.index[axis] + shift, *loop.index[axis + 1 :])
    places = [g.at(result, loop.index) for result in op.results]
    xs = [g.at(source, loop.index) for source in op.operands]
    lines = [f"if ({loop.vars[axis]} == {first}) {{"]
    lines += [f"{place} = {x};" for place, x in zip(places, xs, strict=True)]
    lines.append("} else {")
    found = combine(g, op.regions[0][0], [*(g.at(r, before) for r in op.results), *xs], lines)
    lines += [f"{place} = {e};" for place, e in zip(places, found, strict=True)]
    return [*lines, "}"]
