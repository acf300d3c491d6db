"""The papers' tables on a real chat model: draft lengths, temperatures, verifiers, sources.

    python -m benchmarks.studies.real_model --prompts DIR     # make bench-real PROMPTS=DIR

DIR holds one JSON lines file for each set of prompts ("turns", of which the first is asked). Takes
hours; the same command goes on where an earlier one was stopped. With `--branches` drafts of
several sources are verified together, next to each source alone; with `--drafts` one drafter draws
several, or at temperatures of its own; with `--padded` the target is SmolLM2 zero-padded to so many
parameters: its text and acceptance at the cost of a larger model.
"""

import json
from collections.abc import Sequence
from typing import Any

from benchmarks import sweep
from benchmarks.common import RESULTS
from benchmarks.studies.configs import (
    EAGLE3,
    NGRAM,
    NGRAM_MODEL,
    SUFFIX,
    drafter,
    fixed,
    levels,
    missing,
    sources,
    vllms_own,
)
from benchmarks.sweep import Config, Group
from vllm_hsd.tools.cli.bench_jobs import config_name
from vllm_hsd.tools.cli.options import integers, numbers

VERIFIERS = ("standard", "block")
TEMPERATURES = [0.0, 0.3, 0.6, 0.8, 1.0]
# Draft lengths of the papers' tables; sources are compared at a length that suits lookups too.
LENGTHS = [5, 10, 15]
DRAFT_TEMPERATURES = (0.4, 0.5, 0.6, 0.8, 1.0)


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


def branches(temperatures: Sequence[float], padded: bool) -> list[Group]:
    """Lookups in four rows (next to the unpadded model: memory) and in one, the head, and suffix
    lookup and head by choice."""
    rows = {
        f"lookups, {most} rows": fixed(
            {"sources": [NGRAM, SUFFIX], "branches": most}, adaptive=True
        )
        for most in (4, 1)
    }
    configs: dict[str, dict[str, Any]] = {
        **({} if padded else rows),
        "suffix": fixed(SUFFIX, adaptive=True),
        "head": fixed(EAGLE3, length=3),
        "suffix and head": fixed({"sources": [SUFFIX, EAGLE3]}),
    }
    return [Group("branches", configs, temperatures)]


def drafts(level: dict[str, Any], temperatures: Sequence[float]) -> list[Group]:
    """Several drafts of one drafter by verifier and number, temperatures that it draws at, and
    verifiers of its drafts of seven tokens, vLLM's own eagle3 among them."""
    found = []
    several = {
        f"traversal, {count} drafts": fixed({**level, "branches": count}, length=4)
        for count in (11, 4, 2, 1)
    }
    found.append(Group("several drafts, traversal", several, temperatures))
    for temperature in temperatures:
        scaled = {
            f"draft temperature {drawn}": fixed(
                {**level, "temperature_scale": round(drawn / temperature, 4)}, length=4
            )
            for drawn in DRAFT_TEMPERATURES
        }
        found.append(Group(f"draft temperatures at {temperature:g}", scaled, [temperature]))
    peer = {**vllms_own()["vLLM's eagle3"], "num_speculative_tokens": 7}
    verifiers: dict[str, Config] = {
        **{f"{each} 7": fixed(level, length=7, verifier=each) for each in VERIFIERS},
        "vLLM's eagle3 7": peer,
        "block 7 below vLLM's eagle3": {**peer, "rejection_sample_method": "hierarchical"},
    }
    found.append(Group("verifiers of seven tokens", verifiers, temperatures))
    return found


def main() -> int:
    parser = sweep.options(__doc__, RESULTS / "real_model", sets=True)
    parser.add_argument("--drafter", type=json.loads, help="level (default: the head)")
    parser.add_argument("--lengths", type=integers, default=LENGTHS)
    parser.add_argument("--temperatures", type=numbers, default=TEMPERATURES)
    parser.add_argument("--branches", action="store_true", help="of several sources instead")
    parser.add_argument("--drafts", action="store_true", help="of one drafter instead")
    parser.add_argument("--padded", type=float, help="parameters of a zero-padded target")
    options = parser.parse_args()
    print(*(absent := missing()), sep="\n")
    if options.branches and absent:
        return 1
    level = options.drafter or drafter()
    name = "branches" if options.branches else "drafts" if options.drafts else "real_model"
    name = sweep.padded(options, name)
    if options.branches:
        cells = branches(options.temperatures, bool(options.padded))
    elif options.drafts:
        cells = drafts(level, [each for each in options.temperatures if each > 0])
    else:
        cells = groups(level, options.lengths, options.temperatures)
    # All engines stay loaded: a cache for one text leaves memory for their weights.
    return sweep.study(name, cells, options, kv_cache_memory_bytes=1 << 28)


if __name__ == "__main__":
    raise SystemExit(main())
