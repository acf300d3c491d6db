"""The smallest profile that a planner takes."""

from vllm_hsd.tools.planner.latencies import Latencies, LatencyTable


def plain_profile(batch_sizes: tuple[int, ...] = (1,)) -> dict:
    """Two models, an early exit and the target, without tables."""
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
        "latencies": Latencies(forward=flat).model_dump(exclude_none=True),
    }
