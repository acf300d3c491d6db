"""The papers' tables on a real chat model: draft lengths, temperatures, verifiers, sources.

    python -m benchmarks.studies.real_model --prompts DIR     # make bench-real PROMPTS=DIR

DIR holds one JSON lines file for each set of prompts ("turns", of which the first is asked). Takes
hours; the same command goes on where an earlier one was stopped.
"""

import json
from collections.abc import Sequence
from typing import Any

from benchmarks import plot, sweep
from benchmarks.common import RESULTS
from benchmarks.studies.configs import (
    NGRAM_MODEL,
    SUFFIX,
    drafter,
    fixed,
    levels,
    sources,
)
from benchmarks.sweep import Group
from vllm_hsd.cli.bench_jobs import config_name
from vllm_hsd.cli.options import integers, numbers

VERIFIERS = ("standard", "block")
TEMPERATURES = [0.0, 0.3, 0.6, 0.8, 1.0]
# Draft lengths of the papers' tables; sources are compared at a length that suits lookups too.
LENGTHS = [5, 10, 15]


def groups(
    level: dict[str, Any], lengths: Sequence[int], temperatures: Sequence[float]
) -> list[Group]:
    """The sources, draft lengths at temperature 0 and above it, and lookups that draw.

    At temperature 0 both verifiers accept the same tokens, so one of them is measured there.

    Args:
        level: the drafter whose draft length varies.
    """
    ends = [t for t in temperatures if t in (0.0, 0.6, 1.0)] or list(temperatures)
    sampled = [t for t in temperatures if t > 0]
    drawn = (SUFFIX, {"sources": [NGRAM_MODEL]}, {"sources": [SUFFIX, NGRAM_MODEL]})
    found = [
        Group("sources", _named(sources()), ends),
        Group(
            "draft lengths, greedy",
            draft_lengths(level, lengths, VERIFIERS[-1:]),
            [t for t in temperatures if t == 0],
        ),
        Group("draft lengths, sampled", draft_lengths(level, lengths, VERIFIERS), sampled),
        Group(
            "one token or a distribution",
            _named([fixed(each) for each in drawn]) if SUFFIX in levels() else {},
            [t for t in ends if t > 0],
        ),
    ]
    return [group for group in found if group.configs and group.temperatures]


def _named(configs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {config_name(config): config for config in configs}


def draft_lengths(
    level: dict[str, Any], lengths: Sequence[int], verifiers: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Every length with every verifier, and the longest one with entropy-based stopping."""
    found = {
        f"{verifier} {length}": fixed(level, length=length, verifier=verifier)
        for length in lengths
        for verifier in verifiers
    }
    # A lookup has no distribution of which an entropy could be taken.
    if not {"ngram", "suffix"} & level.keys():
        longest = max(lengths)
        stopping = fixed({**level, "stopping": "entropy"}, length=longest, verifier="block")
        found[f"block {longest}, entropy-based stopping"] = stopping
    return found


def main() -> int:
    parser = sweep.options(__doc__, RESULTS / "real_model", sets=True)
    parser.add_argument("--drafter", type=json.loads, help="level (default: the head)")
    parser.add_argument("--lengths", type=integers, default=LENGTHS)
    parser.add_argument("--temperatures", type=numbers, default=TEMPERATURES)
    options = parser.parse_args()
    prompts, sets = sweep.read_sets(options.prompts, options.num_prompts)
    table = sweep.Table(options.output / "real_model.csv")
    cells = groups(options.drafter or drafter(), options.lengths, options.temperatures)
    faults = sweep.fill(table, cells, options, prompts, sets)
    for measure in ("tokens_per_step", "speedup"):
        print(*sweep.means(table.rows, measure, "temperature"), sep="\n")
    plot.lines(
        [row for row in table.rows if row["configuration"] != sweep.PLAIN],
        table.path.with_suffix(".png"),
        x="temperature",
        measures={"tokens_per_step": "tokens per target step", "speedup": "speed-up"},
        panel="group",
        title=f"{table.rows[0]['dtype']}, {table.rows[0]['machine']}; means of the sets",
    )
    print(f"\nWritten: {table.path}", *faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
