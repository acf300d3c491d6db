"""Operations on whole tensors, and assertions."""

from __future__ import annotations

import math

from .elements import NARROW, UNSIGNED, held, rounded
from .generator import Generator, handles
from .index import Indices
from .ir import Op, matched
from .loop import Loop


@handles("tt.get_program_id", "tt.get_num_programs")
def grid(g: Generator, op: Op) -> None:
    axis = "xyz".index(matched(r".*?\b([xyz])\b", op.text.split(op.name)[1]).group(1))
    g.assign(op.results[0], f"{'pid' if op.name.endswith('id') else 'run->grid'}[{axis}]")


@handles("tt.cat")
def cat(g: Generator, op: Op) -> None:
    g.materialize(op.operands)
    (result,) = op.results
    g.declare(result)
    n = op.operands[0].type.numel
    for start, source in ((0, op.operands[0]), (n, op.operands[1])):
        array = g.arrays[source]
        g.emit(f"memcpy({g.arrays[result]} + {start}, {array}, {n} * sizeof(*{array}));")


@handles("tt.dot")
def dot(g: Generator, op: Op) -> None:
    a, b, c = op.operands[:3]
    (result,) = op.results
    g.materialize([a, b, c])
    g.declare(result)
    *batch, m, k = a.type.shape
    n = b.type.shape[-1]
    x, y, z, out = (g.arrays[value] for value in (a, b, c, result))
    g.emit(
        f"for (int q = 0; q < {math.prod(batch) * m}; q++) {{",
        f"for (int j = 0; j < {n}; j++) {out}[q*{n}+j] = {z}[q*{n}+j];",
        f"for (int k = 0; k < {k}; k++) {{",
        f"{held(result.type)} x = {x}[q*{k}+k];",
        f"for (int j = 0; j < {n}; j++) {out}[q*{n}+j] += x * {y}[(q/{m}*{k}+k)*{n}+j];",
        "}",
    )  # fmt: skip
    if result.type.elem in NARROW:
        e = rounded(result.type.elem, f"{out}[q*{n}+j]")
        g.emit(f"for (int j = 0; j < {n}; j++) {out}[q*{n}+j] = {e};")
    g.emit("}")


@handles("tt.histogram")
def histogram(g: Generator, op: Op) -> None:
    source, *mask = op.operands
    (result,) = op.results
    g.declare(result)
    counts = g.arrays[result]
    g.emit(f"memset({counts}, 0, sizeof({counts}));")

    def write(loop: Loop, idx: Indices) -> None:
        e = g.element(loop, source, idx)
        guard = f"{g.element(loop, mask[0], idx)} && " if mask else ""
        inside = f"({UNSIGNED[source.type.elem]}){e} < {result.type.numel}ull"
        loop.body.append(f"if ({guard}{inside}) {counts}[{e}]++;")

    g.run_loop(source.type.shape, write, splits=False, pragma="GCC unroll 1")


@handles("tt.assert")
def assertion(g: Generator, op: Op) -> None:
    (value,) = op.operands
    message = op.attrs["message"]

    def write(loop: Loop, idx: Indices) -> None:
        e = g.element(loop, value, idx)
        loop.body.append(f'if (!{e}) tc_assert(run, pid, "{message}", {g.place(op)});')

    g.run_loop(value.type.shape, write, splits=False, pragma="GCC unroll 1")


@handles("tt.return")
def leave(g: Generator, op: Op) -> None:
    g.emit(f"return{''.join(f' {value.name}' for value in op.operands)};")
