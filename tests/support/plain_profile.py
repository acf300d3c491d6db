"""The smallest profile that a planner takes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from vllm_hsd.planner.latencies import Latencies, LatencyTable
from vllm_hsd.planner.profile import Profile
from vllm_hsd.planner.survival import independent_survival


def plain_profile() -> dict:
    """Two models, an early exit and the target, without tables."""
    flat = [LatencyTable(batch_sizes=[1], tokens=[1], ms=[[ms]]) for ms in (0.5, 1.0, 5.0)]
    return {
        "schema": 3,
        "target": "models/target",
        "candidates": [
            {"name": "small", "level": {"model": "models/small"}},
            {"name": "exit 2", "level": {"early_exit": 2}},
        ],
        "max_draft_tokens": 4,
        "rates": [[1, 0.7, 0.6], [0.7, 1, 0.8], [0.6, 0.8, 1]],
        "latencies": Latencies(forward=flat).model_dump(exclude_none=True),
    }


def save_profile(
    path: Path,
    target: str,
    levels: list[dict],
    ms: list[Callable[[int], float]],
    rate: float = 0.5,
    found: float = 0.5,
) -> None:
    """Write a profile with tables for drafts of up to 4 tokens.

    Args:
        path: of the JSON file.
        target: its path or name.
        levels: a candidate's keys each.
        ms: milliseconds of a pass of each candidate, then of the target's, by its tokens.
        rate: at which every token is accepted.
        found: share of lookups that find anything; they then find all tokens.
    """
    longest, sizes, count = 4, [1, 4], len(levels) + 1
    lengths = [1, 2, 3, 5]
    lookups = [i for i, level in enumerate(levels) if "ngram" in level]
    rates = [[None if {i, j} & set(lookups) else 1 if i == j else rate for j in range(count)]
             for i in range(count)]  # fmt: skip
    tables = [
        LatencyTable(
            batch_sizes=sizes,
            tokens=[1] if i in lookups else lengths,
            ms=[[float(pass_ms(b * t)) for t in ([1] if i in lookups else lengths)] for b in sizes],
        )
        for i, pass_ms in enumerate(ms)
    ]
    made = Profile.model_validate(
        {
            "schema": 3,
            "target": target,
            "candidates": [{"name": f"level {i}", "level": k} for i, k in enumerate(levels)],
            "max_draft_tokens": longest,
            "rates": rates,
            "tables": "",
            "latencies": Latencies(forward=tables).model_dump(exclude_none=True),
        }
    )
    survival = independent_survival(np.full((count, count), rate), longest)
    # [verifier, draft length, position, offered, accepted]
    joint = np.zeros((count, *[longest + 1] * 4))
    for length in range(longest + 1):
        kept = np.append(rate ** np.arange(length + 1), 0.0)
        joint[:, length, :, length, : length + 1] = found * (kept[:-1] - kept[1:])
        joint[:, length, :, 0, 0] += 1 - found
    made.set_tables(
        {"block": survival, "standard": survival, **{f"lookup{i}": joint for i in lookups}}
    )
    made.save(path)
