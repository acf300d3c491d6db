"""Choose the cascade: exact dynamic program over (model, budget), its k best, and brute force.

The hierarchy problem of "Fast Inference via Hierarchical Speculative Decoding" (section 3) is
a shortest path in a graph whose edges carry a cost and a multiplier. Drafters only call cheaper
ones, so the graph has no cycles but the paper's artificial self-loops, and a dynamic program
over states (model, budget) finds the optimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_hsd.errors import UserError
from vllm_hsd.planner.theory import cascade_latency, check_rates, survival_table

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """A cascade: model indices cheapest first (without the target), their draft_lengths, its cost."""

    levels: tuple[int, ...]
    draft_lengths: tuple[int, ...]
    cost: float


@dataclass(frozen=True)
class Graph:
    """The edges between M drafters with draft_lengths 1..T, and from the target to each of them.

    Model i handing up j tokens, which it makes from drafts of model k with budget l, costs
    `cost[i, k, l - 1, j - 1] + multiplier[i, k, l - 1, j - 1] * (cost of l tokens of k)`;
    without a drafter below it costs `alone[i, j - 1]`. The target emits a token for
    `target_cost[i, j - 1] + target_multiplier[i, j - 1] * (cost of j tokens of i)`, and for
    `target_alone` without any drafter. Edges that do not exist cost infinity.
    """

    cost: Floats  # [M, M, T, T]
    multiplier: Floats  # [M, M, T, T]
    alone: Floats  # [M, T]
    target_cost: Floats  # [M, T]
    target_multiplier: Floats  # [M, T]
    target_alone: float

    def __post_init__(self) -> None:
        if self.alone.shape[1] < 1:
            raise UserError("the largest budget must be at least 1.")
        if not (np.all(self.alone > 0) and self.target_alone > 0):
            raise UserError("every forward must cost more than 0.")


def check_costs(costs: ArrayLike, names: Sequence[str] | None = None) -> Floats:
    """The costs as float64 [M + 1], target last.

    Raises:
        UserError: a cost that is not finite, zero or negative; names the model.
    """
    costs = np.asarray(costs, dtype=np.float64)
    for i in np.flatnonzero(~(np.isfinite(costs) & (costs > 0))):
        name = f"model {i}" if names is None else names[i]
        raise UserError(f"the cost of {name} is {costs[i]:g}: it must be above 0.")
    return costs


def gain_table(survival: Floats) -> Floats:
    """P(a round gains g tokens | n were drafted), [..., T + 1 (n), T + 2 (g)].

    Args:
        survival: P(at least t tokens are accepted), [..., T + 1]; 1 at t = 0.
    """
    size = survival.shape[-1]
    # Nothing beyond the draft's end.
    alive = np.tril(np.repeat(survival[..., None, :], size, axis=-2))
    gains = np.zeros((*alive.shape[:-1], size + 1))
    gains[..., 1:-1] = alive[..., :-1] - alive[..., 1:]
    gains[..., -1] = alive[..., -1]
    return gains


def renewal(survival: Floats, reward: Floats, capped: bool) -> Floats:
    """Expected reward summed over rounds until T tokens are made, [..., T (l), T (wanted)].

    Args:
        survival: P(at least t accepted) of rounds of budget l that start at a position,
            [..., T + 1 (l), T + 1 (position), T + 1 (t)]; 1 at t = 0.
        reward: what one round of n drafted tokens adds, [..., T + 1 (n)].
        capped: ask for min(l, wanted - have - 1) tokens, as this package's cascade does, so
            that no round overshoots; otherwise always ask for l, as the paper does.
    """
    size = survival.shape[-1] - 1
    draft_lengths = np.arange(1, size + 1)
    shape = np.broadcast_shapes(survival.shape[:-3], reward.shape[:-1])
    total = np.zeros((*shape, size, size))
    for wanted in range(1, size + 1):
        # What is still to come once so many tokens are made; the last: enough.
        value = [np.zeros((*shape, size)) for _ in range(wanted + 1)]
        for have in reversed(range(wanted)):
            asked = np.minimum(draft_lengths, wanted - have - 1) if capped else draft_lengths
            here = value[have]
            here += reward[..., asked] + value[have + 1]
            # E[value] = value at no token accepted + the change at each further one.
            for t in range(1, wanted - have):
                change = value[have + t + 1] - value[have + t]
                here[..., t - 1 :] += survival[..., t:, have, t] * change[..., t - 1 :]
        total[..., wanted - 1] = value[0]
    return total


def paper_graph(costs: ArrayLike, rates: ArrayLike, max_budget: int) -> Graph:
    """The paper's instance (Table 2): independent acceptance, rounds that may overshoot.

    Args:
        costs: time of one forward of each model, cheapest first, the target last [M + 1].
        rates: acceptance rates [M + 1, M + 1], symmetric; the diagonal is not read.
        max_budget: the largest T of any level.

    Raises:
        UserError: costs or rates that cannot be (see `check_costs`, `check_rates`).
    """
    costs, rates = check_costs(costs), check_rates(rates)
    verify = np.repeat(costs[:, None], max_budget + 1, axis=1)
    survival = survival_table(rates, max_budget)
    return build_graph(costs[:-1], verify, float(costs[-1]), survival, capped=False)


def build_graph(
    draft: Floats, verify: Floats, plain: float, survival: Floats, *, capped: bool
) -> Graph:
    """Edges from measured costs and survival tables; models cheapest first, the target last.

    Args:
        draft: time in which a model drafts one token on its own [M].
        verify: time in which a model verifies n tokens, [M + 1, T + 1 (n)].
        plain: time in which the target makes one token without speculation.
        survival: P(model i accepts at least t tokens drafted by k with some budget after
            having made some tokens), [M + 1 (i), M + 1 (k), T + 1 (budget), T + 1 (made),
            T + 1 (t)]; see `laws.Laws`.
        capped: whether the last rounds ask for fewer tokens (see `renewal`). A capped level
            that asks for fewer tokens than its drafter's budget is taken to pay in proportion.
    """
    models, size = len(draft), verify.shape[1] - 1
    tokens = np.arange(1, size + 1)
    pairs = survival[:-1, :-1]
    asked = np.arange(size + 1, dtype=np.float64)
    cost = renewal(pairs, verify[:-1, None], capped)
    multiplier = renewal(pairs, asked, capped) / tokens[:, None]
    cost[np.triu_indices(models)] = np.inf  # a drafter is cheaper than its verifier
    # The paper's graph has no drafter with a larger budget than the level that it drafts for;
    # a capped level that owes j tokens never asks for more than j - 1.
    useless = tokens[:, None] >= tokens if capped else tokens[:, None] > tokens
    cost[:, :, useless] = np.inf
    multiplier[:, :, useless] = 1.0
    emitted = np.tril(survival[-1, :-1, :, 0]).sum(-1)[:, 1:]
    return Graph(
        cost=cost,
        multiplier=multiplier,
        alone=draft[:, None] * tokens,
        target_cost=verify[-1, 1:] / emitted,
        target_multiplier=1.0 / emitted,
        target_alone=plain,
    )


def solve(
    graph: Graph, k: int = 1, max_levels: int | None = None, *, exactly: bool = False
) -> list[Plan]:
    """The k cheapest cascades in ascending order of cost; no speculation counts as one.

    Args:
        graph: from `paper_graph` or `build_graph`.
        max_levels: most drafters in a cascade; None: as many as there are.
        exactly: only cascades of `max_levels` drafters.
    """
    if k < 1:
        raise UserError(f"k is {k}: ask for at least one plan.")
    models, size = graph.alone.shape
    # values[i, j, r]: r-th cheapest way in which model i hands up j + 1 tokens.
    values = np.full((models, size, k), np.inf)
    values[..., 0] = graph.alone
    pointers: list[NDArray[np.int64]] = [np.full((models, size, k), -1)]
    for _ in range(1, models if max_levels is None else max_levels):
        deeper, pointer = _one_level_deeper(graph, values, or_alone=not exactly)
        if np.array_equal(deeper, values):
            break
        values = deeper
        pointers.append(pointer)
    plans = [] if exactly and max_levels else [Plan((), (), graph.target_alone)]
    if max_levels != 0:
        total = graph.target_cost[..., None] + graph.target_multiplier[..., None] * values
        for state in np.argsort(total, axis=None, kind="stable")[:k]:
            if np.isfinite(total.flat[state]):
                i, j, r = (int(x) for x in np.unravel_index(state, total.shape))
                plans.append(_trace(pointers, i, j, r, float(total.flat[state])))
    return sorted(plans, key=lambda plan: plan.cost)[:k]


def _one_level_deeper(
    graph: Graph, below: Floats, or_alone: bool
) -> tuple[Floats, NDArray[np.int64]]:
    """k cheapest ways per state, given those of the drafters below.

    Args:
        or_alone: whether a model may also draft without any below.

    Returns values and pointers [M, T, k]; a pointer is the flat index of a state of `below`,
    or -1 for drafting alone.
    """
    models, size, k = below.shape
    alone = graph.alone if or_alone else np.full_like(graph.alone, np.inf)
    values = np.full_like(below, np.inf)
    pointers = np.full(below.shape, -1, dtype=np.int64)
    values[..., 0] = alone
    for i in range(1, models):
        # edges [i * T (drafter and its budget), T (tokens handed up)]
        cost = graph.cost[i, :i].reshape(-1, size)
        multiplier = graph.multiplier[i, :i].reshape(-1, size)
        first = cost + multiplier * below[:i, :, 0].reshape(-1, 1)
        # The k cheapest ways use only the k edges that are cheapest with their best ending.
        keep = min(k, len(first))
        edges = np.argpartition(first, keep - 1, axis=0)[:keep]  # [keep, T]
        columns = np.arange(size)
        ends = below[:i].reshape(-1, k)[edges]  # [keep, T, k]
        ways = cost[edges, columns][..., None] + multiplier[edges, columns][..., None] * ends
        ways = np.moveaxis(ways, 1, 0).reshape(size, -1)
        states = np.moveaxis(edges[..., None] * k + np.arange(k), 1, 0).reshape(size, -1)
        ways = np.concatenate([alone[i][:, None], ways], axis=1)
        states = np.concatenate([np.full((size, 1), -1), states], axis=1)
        order = np.argsort(ways, axis=1, kind="stable")[:, :k]
        values[i] = np.take_along_axis(ways, order, axis=1)
        pointers[i] = np.take_along_axis(states, order, axis=1)
    return values, pointers


def _trace(pointers: list[NDArray[np.int64]], i: int, j: int, r: int, cost: float) -> Plan:
    levels, draft_lengths = [], []
    shape = pointers[0].shape
    for pointer in reversed(pointers):
        levels.append(i)
        draft_lengths.append(j + 1)
        if pointer[i, j, r] < 0:
            break
        i, j, r = (int(x) for x in np.unravel_index(pointer[i, j, r], shape))
    return Plan(tuple(reversed(levels)), tuple(reversed(draft_lengths)), cost)


def plan_cost(graph: Graph, levels: Sequence[int], draft_lengths: Sequence[int]) -> float:
    """Cost per token of one cascade of the graph, cheapest level first."""
    if not levels:
        return graph.target_alone
    time = graph.alone[levels[0], draft_lengths[0] - 1]
    for n in range(1, len(levels)):
        edge = levels[n], levels[n - 1], draft_lengths[n - 1] - 1, draft_lengths[n] - 1
        time = graph.cost[edge] + graph.multiplier[edge] * time
    top = levels[-1], draft_lengths[-1] - 1
    return float(graph.target_cost[top] + graph.target_multiplier[top] * time)


def all_cascades(models: int, max_budget: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every (levels, draft_lengths) with draft_lengths that do not fall towards the target."""
    for depth in range(models + 1):
        for levels in itertools.combinations(range(models), depth):
            for draft_lengths in itertools.combinations_with_replacement(
                range(1, max_budget + 1), depth
            ):
                yield levels, draft_lengths


def brute_force(costs: ArrayLike, rates: ArrayLike, max_budget: int, k: int = 1) -> list[Plan]:
    """The k cheapest cascades of the paper's instance by evaluating Corollary 3.1 for each.

    For checking `solve(paper_graph(...))` on small cases: the number of cascades grows as
    2^M * T^M. Arguments as for `paper_graph`.
    """
    costs, rates = check_costs(costs), check_rates(rates)
    target = len(costs) - 1
    plans = []
    for levels, draft_lengths in all_cascades(target, max_budget):
        chain = [*levels, target]
        pairs = [rates[below, above] for below, above in itertools.pairwise(chain)]
        plans.append(
            Plan(levels, draft_lengths, cascade_latency(costs[chain], pairs, draft_lengths))
        )
    return sorted(plans, key=lambda plan: plan.cost)[:k]
