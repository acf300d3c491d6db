"""Cascades against single drafters of the best length, on real text at the cost of a larger model.

    python -m benchmarks.studies.cascades --prompts DIR --planned cascade.json

The central comparison of "Fast Inference via Hierarchical Speculative Decoding": what
`vllm-hsd plan` chose (of a profile on other prompts) and other cascades of two to four levels, next
to every single drafter at several lengths, the best of which is chosen *after* the measurement. The
target is SmolLM2-135M-Instruct zero-padded: its text and acceptance at the cost of a larger model.
With `--best-of`, only the best cascade and the best single drafter of an earlier run, so that there
is time for many prompts and nothing is chosen after the measurement.
"""

import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks import sweep
from benchmarks.columns import Table
from benchmarks.common import RESULTS
from benchmarks.models.smollm2 import int8
from benchmarks.shared_engines import SharedEngines
from benchmarks.studies.configs import EAGLE3, NGRAM_MODEL, SUFFIX, fixed, planned
from benchmarks.sweep import Config, Group
from vllm_hsd.tools.cli.bench_jobs import config_name
from vllm_hsd.tools.cli.options import numbers

COPY_LENGTHS = (4, 6, 8, 12)
SUFFIX_LENGTHS = (4, 8)
HEAD_LENGTHS = (2, 3)
ADAPTIVE_LENGTHS = (8, 5, 3)


def _cascade(*levels: tuple[dict[str, Any], int]) -> dict[str, Any]:
    lengths = [{**level, "num_tokens": length} for level, length in levels]
    return fixed(*lengths, length=levels[-1][1])


def configs() -> dict[str, Config]:
    """Cascades and single drafters by name; the first one's engine serves all but the head's."""
    copy = {"model": os.path.relpath(int8())}
    pairs = {**NGRAM_MODEL, "order": 2}
    found = [
        _cascade((SUFFIX, 8), (pairs, 9), (NGRAM_MODEL, 10), (copy, 12)),
        _cascade((SUFFIX, 4), (NGRAM_MODEL, 8), (copy, 12)),
        *(_cascade((SUFFIX, own), (copy, length)) for own, length in ((8, 12), (4, 12), (4, 8))),
        _cascade((EAGLE3, 3), (copy, 12)),
        *(_cascade((copy, length)) for length in COPY_LENGTHS[::-1]),
        *(_cascade((SUFFIX, length)) for length in SUFFIX_LENGTHS[::-1]),
        *(_cascade((EAGLE3, length)) for length in HEAD_LENGTHS[::-1]),
    ]
    return {config_name(config): config for config in found}


def by_length() -> dict[str, Config]:
    """The copy with fixed lengths, and with lengths that the budget chooses."""
    copy = {"model": os.path.relpath(int8())}
    lengths = {f"fixed {length}": _cascade((copy, length)) for length in ADAPTIVE_LENGTHS}
    longest = fixed(copy, length=ADAPTIVE_LENGTHS[0], adaptive=True)
    return {**lengths, f"adaptive {ADAPTIVE_LENGTHS[0]}": longest}


def best_of(found: dict[str, Config], earlier: Path) -> dict[str, Config]:
    """The fastest cascade and the fastest single drafter, in the mean of an earlier run's rows."""
    rows = Table(earlier).rows
    speed = {
        name: statistics.fmean(float(r["speedup"]) for r in rows if r["configuration"] == name)
        for name in {row["configuration"] for row in rows} & found.keys()
    }
    cascades = {name for name, config in found.items() if config and len(config["levels"]) > 1}
    chosen = [
        max(speed.keys() & cascades, key=speed.__getitem__),
        max(speed.keys() - cascades, key=speed.__getitem__),
    ]
    return {name: found[name] for name in chosen}


def main() -> int:
    parser = sweep.options(__doc__, RESULTS / "cascades", sets=True)
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 1.0])
    parser.add_argument("--padded", type=float, default=800e6, help="parameters of the target")
    parser.add_argument("--adaptive", action="store_true", help="of the copy's lengths instead")
    parser.add_argument("--planned", type=Path, help="what `vllm-hsd plan` wrote for one of them")
    parser.add_argument("--best-of", type=Path, help="table of an earlier run: its best two alone")
    options = parser.parse_args()
    name = sweep.padded(options, "copy_lengths" if options.adaptive else "cascades")
    found = by_length() if options.adaptive else configs()
    if options.best_of:
        name, found = f"{name}_best", best_of(found, options.best_of)
    if options.planned:
        config = planned(options.planned)
        found[f"planned: {config_name(config)}"] = config
    return sweep.study(
        name,
        [Group("cascades", found, options.temperatures)],
        options,
        engines_class=SharedEngines,
        kv_cache_memory_bytes=1 << 28,
    )


if __name__ == "__main__":
    raise SystemExit(main())
