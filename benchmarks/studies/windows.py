"""Ways to verify below the target, with and without windows that end where a drafter is unsure.

    python -m benchmarks.studies.windows --prompts DIR     # or `make bench-windows PROMPTS=DIR`

Table 2 of "HSDDW: Hierarchical Speculative Decoding with Dynamic Windows" on SmolLM2: an 8-bit copy
drafts for the target, alone or above the n-gram model, which takes the place of the paper's
smallest model. Tokens per step, redundancy and target use are counts, which a busy machine does not
change. The copy costs nearly as much as this target: times, as in the paper, need `--padded`, a
target zero-padded to so many parameters.
"""

import os
from collections.abc import Sequence
from typing import Any

from benchmarks import sweep
from benchmarks.common import RESULTS
from benchmarks.models.smollm2 import int8
from benchmarks.shared_engines import SharedEngines
from benchmarks.studies.configs import NGRAM_MODEL, fixed
from benchmarks.sweep import Group
from vllm_hsd.tools.cli.options import integers, numbers

# The sets of the paper's table, by the names of their files.
SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca")
MEASURES = {
    "tokens_per_step": "tokens per target step",
    "redundancy": "redundancy",
    "target_utilization": "target use",
    "speedup": "speed-up",
}


def group(limits: Sequence[int], temperatures: Sequence[float]) -> Group:
    """The paper's five ways at every draft limit; the largest one hosts the others.

    "standard" and "self-verify" have the copy alone. Below it, "pre-verify" and "both" draft once a
    step; with "dynamic windows" rounds go on until the copy is unsure. The draft limit is that of
    both levels.
    """
    copy = {"model": os.path.relpath(int8())}
    unsure = {"stopping": "entropy"}
    ways: dict[str, list[dict[str, Any]]] = {
        "standard": [copy],
        "pre-verify": [NGRAM_MODEL, {**copy, "max_rounds": 1}],
        "self-verify": [{**copy, **unsure}],
        "both": [{**NGRAM_MODEL, **unsure}, {**copy, "max_rounds": 1}],
        "dynamic windows": [{**NGRAM_MODEL, **unsure}, {**copy, **unsure}],
    }
    configs = {
        f"{name}, {limit}": fixed(
            *({**level, "num_tokens": limit} for level in levels[:-1]), levels[-1], length=limit
        )
        for limit in sorted(limits, reverse=True)
        for name, levels in ways.items()
    }
    return Group("windows", configs, temperatures)


def by_limit(row: dict[str, str]) -> dict[str, str]:
    """A row of a table for each temperature, with the draft limit."""
    way, limit = row["configuration"].rsplit(", ", 1)
    group = f"temperature {float(row['temperature']):g}"
    return {**row, "group": group, "configuration": way, "draft limit": limit}


def main() -> int:
    parser = sweep.options(__doc__, RESULTS / "windows", sets=True)
    parser.add_argument("--limits", type=integers, default=[5, 10, 15])
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 1.0])
    parser.add_argument("--padded", type=float, help="parameters of a zero-padded target")
    options = parser.parse_args()
    return sweep.study(
        sweep.padded(options, "windows"),
        [group(options.limits, options.temperatures)],
        options,
        sets=SETS,
        x="draft limit",
        measures=MEASURES,
        view=by_limit,
        engines_class=SharedEngines,
        kv_cache_memory_bytes=1 << 28,
    )


if __name__ == "__main__":
    raise SystemExit(main())
