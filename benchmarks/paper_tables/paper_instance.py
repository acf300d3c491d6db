"""The hierarchy problem exactly as "Fast Inference via Hierarchical Speculative Decoding" poses it.

Independent acceptance with one rate per pair, one cost per model, and rounds that may overshoot;
with all its cascades, to check the dynamic program of `vllm_hsd.tools.planner.optimize` against.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from vllm_hsd.tools.planner.optimize import Graph, build_graph
from vllm_hsd.tools.planner.survival import Acceptance, independent_survival


def paper_graph(costs: ArrayLike, rates: ArrayLike, max_tokens: int) -> Graph:
    """The paper's instance (Table 2).

    Args:
        costs: time of one forward of each model, cheapest first, the target last [M + 1].
        rates: acceptance rates [M + 1, M + 1], symmetric; the diagonal is not read.
        max_tokens: the longest draft T of any level.

    Raises:
        UserError: impossible costs.
    """
    costs = np.asarray(costs, dtype=np.float64)
    verify = np.repeat(costs[:, None], max_tokens + 1, axis=1)
    acceptance = Acceptance(independent_survival(rates, max_tokens))
    return build_graph(costs[:-1], verify, float(costs[-1]), acceptance, capped=False)


def selection_cost(graph: Graph, levels: Sequence[int], draft_lengths: Sequence[int]) -> float:
    """Cost per token of one cascade of graph nodes, cheapest first."""
    if not levels:
        return graph.target_alone
    time = graph.alone[levels[0], draft_lengths[0] - 1]
    for n in range(1, len(levels)):
        edge = levels[n], levels[n - 1], draft_lengths[n - 1] - 1, draft_lengths[n] - 1
        time = graph.cost[edge] + graph.multiplier[edge] * time
    top = levels[-1], draft_lengths[-1] - 1
    return float(graph.target_cost[top] + graph.target_multiplier[top] * time)


def all_cascades(models: int, max_tokens: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every (levels, draft lengths) whose draft lengths do not fall toward the target."""
    for depth in range(models + 1):
        for levels in itertools.combinations(range(models), depth):
            for lengths in itertools.combinations_with_replacement(range(1, max_tokens + 1), depth):
                yield levels, lengths
