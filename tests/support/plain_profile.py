"""The smallest profile that a planner takes."""

from vllm_hsd.tools.planner.latencies import Latencies, LatencyTable
from vllm_hsd.tools.planner.profile import Profile
from vllm_hsd.tools.planner.survival import VERIFIERS, independent_survival


def plain_profile(batch_sizes: tuple[int, ...] = (1,)) -> dict:
    """Two models, an early exit and the target, as a profile's file holds them."""
    sizes, times = list(batch_sizes), (0.5, 1.0, 5.0)
    flat = [LatencyTable(batch_sizes=sizes, tokens=[1], ms=[[ms]] * len(sizes)) for ms in times]
    return {
        "schema": 3,
        "target": "models/target",
        "candidates": [
            {"name": "small", "level": {"model": "models/small"}},
            {"name": "exit 2", "level": {"early_exit": 2}},
        ],
        "max_draft_tokens": 4,
        "rates": [[1, 0.7, 0.6], [0.7, 1, 0.8], [0.6, 0.8, 1]],
        "tables": "",
        "latencies": Latencies(forward=flat).model_dump(exclude_none=True),
    }


def with_tables(raw: dict) -> Profile:
    """The profile with the tables of acceptance that is independent, at its rates."""
    found = Profile(**raw)
    survival = independent_survival(raw["rates"], raw["max_draft_tokens"])
    found.set_tables(dict.fromkeys(VERIFIERS, survival))
    return found
