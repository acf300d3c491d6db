"""The hierarchy problem exactly as "Fast Inference via Hierarchical Speculative Decoding" poses it.

Independent acceptance with one rate per pair, one cost per model, and rounds that may overshoot;
with an exhaustive search to check the dynamic program of `vllm_hsd.tools.planner.optimize` against.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from benchmarks.paper_tables.closed_forms import cascade_latency
from vllm_hsd.errors import UserError
from vllm_hsd.tools.planner.optimize import Graph, build_graph
from vllm_hsd.tools.planner.predict import Selection
from vllm_hsd.tools.planner.profile import check_rates
from vllm_hsd.tools.planner.survival import Acceptance, independent_survival

Floats = NDArray[np.float64]


def check_costs(costs: ArrayLike) -> Floats:
    """The costs as float64 [M + 1], target last.

    Raises:
        UserError: a cost that is not finite, zero or negative; names the model.
    """
    costs = np.asarray(costs, dtype=np.float64)
    for i in np.flatnonzero(~(np.isfinite(costs) & (costs > 0))):
        raise UserError(f"the cost of model {i} is {costs[i]:g}: it must be above 0.")
    return costs


def paper_graph(costs: ArrayLike, rates: ArrayLike, max_tokens: int) -> Graph:
    """The paper's instance (Table 2).

    Args:
        costs: time of one forward of each model, cheapest first, the target last [M + 1].
        rates: acceptance rates [M + 1, M + 1], symmetric; the diagonal is not read.
        max_tokens: the longest draft T of any level.

    Raises:
        UserError: impossible costs or rates.
    """
    costs, rates = check_costs(costs), check_rates(rates)
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


def brute_force(
    costs: ArrayLike, rates: ArrayLike, max_tokens: int, k: int = 1
) -> list[tuple[Selection, float]]:
    """The k cheapest cascades by evaluating Corollary 3.1 for each of the 2^M * T^M.

    Arguments as for `paper_graph`.
    """
    costs, rates = check_costs(costs), check_rates(rates)
    target = len(costs) - 1
    found = []
    for levels, lengths in all_cascades(target, max_tokens):
        chain = [*levels, target]
        pairs = [rates[below, above] for below, above in itertools.pairwise(chain)]
        cost = cascade_latency(costs[chain], pairs, lengths)
        found.append((Selection(levels, lengths), cost))
    return sorted(found, key=lambda item: item[1])[:k]
