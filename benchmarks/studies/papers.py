"""The papers' tables on a real family: Qwen2.5-Coder 1.5B, drafted for by its 0.5B.

    python -m benchmarks.studies.papers --prompts DIR     # or `make bench-papers PROMPTS=DIR`

Several drafts of one drafter ("Overcoming Joint Intractability with Lossless Hierarchical
Speculative Decoding", Table 2; its Table 1 is `paper_tables.family_verifiers`), ways to verify with
and without windows that end where a drafter is unsure ("HSDDW: Hierarchical Speculative Decoding
with Dynamic Windows", Table 2), and further levels: 8-bit weights, three levels, an exit of the
target ("Fast Inference via Hierarchical Speculative Decoding", Table 3). Tokens per step are
counts, which a busy machine does not change. Takes hours; the same command goes on where an earlier
one was stopped.
"""

import os
from typing import Any

from benchmarks import plot, sweep
from benchmarks.columns import Table, means
from benchmarks.common import RESULTS
from benchmarks.models.quantize import int8_copy
from benchmarks.models.qwen_coder import qwen_coder
from benchmarks.shared_engines import SharedEngines
from benchmarks.studies.configs import fixed
from benchmarks.sweep import PLAIN, Config, Group

MEASURES = {"tokens_per_step": "tokens per target step", "speedup": "speed-up"}
# Engines that do not share their levels, as many as fit in memory together.
DRAFTS = (4, 1), (11, 2)
WAYS = ("dynamic windows", "both"), ("self-verify", "pre-verify"), ("standard",)
DRAWN_LENGTH, LIMIT, EXIT = 4, 10, 14
SUFFIX: dict[str, Any] = {"suffix": {}, "num_tokens": 8}


def several_drafts(small: dict[str, Any], counts: tuple[int, ...]) -> dict[str, Config]:
    """Drafts that the target verifies together (Traversal Verification)."""
    return {
        f"{n} drafts of {DRAWN_LENGTH}": fixed({**small, "branches": n}, length=DRAWN_LENGTH)
        for n in counts
    }


def windows(small: dict[str, Any]) -> dict[str, Config]:
    """The paper's five ways; the place of its smallest model has a lookup, which is never unsure.

    "standard" and "self-verify" have the 0.5B alone. "pre-verify" and "both" verify one draft of
    the lookup; with "dynamic windows" rounds go on until the 0.5B is unsure.
    """
    lookup = {"suffix": {}, "num_tokens": LIMIT}
    unsure, once = {"stopping": "entropy"}, {"max_rounds": 1}
    ways: dict[str, list[dict[str, Any]]] = {
        "dynamic windows": [lookup, {**small, **unsure}],
        "both": [lookup, {**small, **unsure, **once}],
        "self-verify": [{**small, **unsure}],
        "pre-verify": [lookup, {**small, **once}],
        "standard": [small],
    }
    return {name: fixed(*levels, length=LIMIT) for name, levels in ways.items()}


def further_levels(small: dict[str, Any]) -> dict[str, Config]:
    """Two levels and the 0.5B next to its copy of 8 bits, three levels, and an exit."""
    copy = {"model": os.path.relpath(int8_copy(qwen_coder("0.5B")))}
    return {
        "suffix 8 < 8-bit 0.5B 6 < 0.5B 8": fixed(
            SUFFIX, {**copy, "num_tokens": 6}, small, length=8
        ),
        "suffix 8 < 0.5B 8": fixed(SUFFIX, small, length=8),
        "0.5B 3": fixed(small, length=3),
        "8-bit 0.5B 3": fixed(copy, length=3),
        f"exit {EXIT}, 3": fixed({"early_exit": EXIT}, length=3),
    }


def groups() -> dict[str, Group]:
    """By name, each with its temperatures; what is only counted is answered four at a time."""
    small = {"model": os.path.relpath(qwen_coder("0.5B"))}
    found: dict[str, tuple[dict[str, Config], list[float]]] = {}
    for counts in DRAFTS:
        found[f"drafts {' and '.join(map(str, counts))}"] = several_drafts(small, counts), [1.0]
    ways = windows(small)
    for names in WAYS:
        found[f"windows: {', '.join(names)}"] = {name: ways[name] for name in names}, [0.0, 1.0]
    found["levels"] = further_levels(small), [0.0]
    sizes = {name: [4 if name.startswith("windows") else 1] for name in found}
    return {name: Group(name, *each, sizes[name]) for name, each in found.items()}


def main() -> int:
    parser = sweep.options(__doc__, RESULTS, sets=True, model=False)
    parser.set_defaults(max_tokens=64, num_prompts=4)
    parser.add_argument("--groups", nargs="+", help="names of groups (default: all)")
    options = parser.parse_args()
    options.model = os.path.relpath(qwen_coder("1.5B"))
    found = groups()
    prompts, sets = sweep.read_sets(options.prompts, options.num_prompts)
    table = Table(options.output / "papers.csv")
    faults = sweep.fill(
        table,
        [found[name] for name in options.groups or found],
        options,
        prompts,
        sets,
        engines_class=SharedEngines,
        # Eleven drafts of eleven requests have 121 blocks.
        kv_cache_memory_bytes=11 << 26,
    )
    rows = [row for row in table.rows if row["configuration"] != PLAIN]
    for measure in MEASURES:
        print(*means(rows, measure), sep="\n")
    title = f"{rows[0]['dtype']}, {rows[0]['machine']}; means of the sets"
    figure = table.path.with_suffix(".png")
    plot.lines(rows, figure, x="temperature", measures=MEASURES, panel="group", title=title)
    print(f"\nWritten: {table.path}, {figure}", *faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
