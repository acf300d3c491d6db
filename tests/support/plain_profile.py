"""The smallest profile that a planner takes."""

from vllm_hsd.tools.planner.latencies import Latencies, LatencyTable


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
