"""One adaptive configuration over kinds of text, batch sizes, temperatures and prefix caches.

    python -m benchmarks.studies.workloads --prompts DIR      # make bench-workloads PROMPTS=DIR

DIR holds one JSON lines file for each set of prompts. No speculation, fixed draft lengths and the
adaptive default answer every batch with an empty prefix cache, and at once again with the prompts
in it; an engine keeps what it has learned. The same command goes on where an earlier one was
stopped. Prints how often the adaptive configuration is slower than the others.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import sweep
from benchmarks.columns import Table, means
from benchmarks.common import RESULTS
from benchmarks.studies.configs import NGRAM, SUFFIX, fixed, levels, missing
from benchmarks.sweep import PLAIN, Group
from vllm_hsd.tools.cli.options import integers, numbers

ADAPTIVE = "adaptive"
LENGTHS = (8, 3)
# Prompts of a cell at least: small batches are over sooner and differ more.
FEWEST_PROMPTS = {1: 8, 4: 12, 16: 16, 64: 64}


def group(batch_sizes: Sequence[int], temperatures: Sequence[float]) -> Group:
    """The best lookup with long and short fixed drafts, and adaptive."""
    lookup = SUFFIX if SUFFIX in levels() else NGRAM
    configs = {f"fixed {length}": fixed(lookup, length=length) for length in LENGTHS}
    configs[ADAPTIVE] = fixed(lookup, adaptive=True)
    return Group("", configs, temperatures, batch_sizes, ("cold", "warm"), FEWEST_PROMPTS)


def shortfalls(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How the adaptive configuration compares with no speculation and the best fixed one."""
    cells: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        key = (row["set"], row["batch_size"], row["temperature"], row["cache"])
        cells.setdefault(key, {})[row["configuration"]] = row
    own = [float(cell[ADAPTIVE]["speedup"]) for cell in cells.values()]
    best = [
        max(float(row["speedup"]) for name, row in cell.items() if name != ADAPTIVE)
        for cell in cells.values()
    ]
    first = [float(cell[ADAPTIVE]["first_token"]) for cell in cells.values()]
    shares = [a / b for a, b in zip(own, best, strict=True)]
    for what, values, bound in (
        ("over no speculation", own, 0.98),
        ("over the best of no speculation and fixed lengths", shares, 0.97),
    ):
        low = sum(value < bound for value in values)
        yield (
            f"adaptive {what}: mean {statistics.fmean(values):.3f}, least {min(values):.2f}, "
            f"below {bound} at {low} of {len(values)} points"
        )
    late = sum(value > 1.03 for value in first)
    yield (
        f"time to first token over no speculation: median {statistics.median(first):.3f}, "
        f"most {max(first):.2f}, above 1.03 at {late} of {len(first)} points"
    )


def main() -> int:
    parser = sweep.options(__doc__, RESULTS / "workloads", sets=True)
    parser.add_argument("--batch-sizes", type=integers, default=[1, 4, 16, 64])
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 1.0])
    options = parser.parse_args()
    for line in missing():
        print(line)
    table = Table(options.output / "workloads.csv")
    cells = [group(options.batch_sizes, options.temperatures)]
    faults = sweep.fill(table, cells, options, *sweep.read_sets(options.prompts, 64))
    drafting = [row for row in table.rows if row["configuration"] != PLAIN]
    named = [
        row | {"group": f"temperature {row['temperature']}, {row['cache']}"} for row in drafting
    ]
    print(*means(named, "speedup", "batch_size"), sep="\n")
    print(*shortfalls(table.rows), f"Written: {table.path}", *faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
