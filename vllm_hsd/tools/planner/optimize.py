"""Optimal hierarchies: a dynamic program over (model, draft length) and its k best cascades.

The hierarchy problem of "Fast Inference via Hierarchical Speculative Decoding" (section 3) is
a shortest path in a graph whose edges carry a cost and a multiplier. Drafters only call cheaper
ones, so the graph has no cycles but the paper's artificial self-loops, and a dynamic program
over states (model, draft length) finds the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vllm_hsd.errors import UserError
from vllm_hsd.tools.planner.predict import Measured, Selection
from vllm_hsd.tools.planner.survival import Acceptance, folded

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Graph:
    """The edges between M drafters with draft lengths 1..T, and from the target to each of them.

    Node i stands for the model `order[i]`. Node i passing on j tokens, which it makes from drafts
    of l tokens of node k, costs `cost[i, k, l - 1, j - 1] + multiplier[i, k, l - 1, j - 1] *
    (cost of l tokens of k)`; without a drafter below it costs `alone[i, j - 1]`. The target emits
    a token for `target_cost[i, j - 1] + target_multiplier[i, j - 1] * (cost of j tokens of i)`,
    and for `target_alone` without any drafter. Edges that do not exist cost infinity. Raises
    UserError where there is no draft length, or a forward costs nothing.
    """

    order: tuple[int, ...]
    cost: Floats  # [M, M, T, T]
    multiplier: Floats  # [M, M, T, T]
    alone: Floats  # [M, T]
    target_cost: Floats  # [M, T]
    target_multiplier: Floats  # [M, T]
    target_alone: float

    def __post_init__(self) -> None:
        if self.alone.shape[1] < 1:
            raise UserError("the longest draft must be at least 1 token.")
        if not (np.all(self.alone > 0) and self.target_alone > 0):
            raise UserError("every forward must cost more than 0.")

    def through(self, node: int) -> Graph:
        """The graph without the cascades that leave a node out."""
        cost, alone, target_cost = self.cost.copy(), self.alone.copy(), self.target_cost.copy()
        cost[node + 1 :, :node] = np.inf
        alone[node + 1 :] = np.inf
        target_cost[:node] = np.inf
        return replace(self, cost=cost, alone=alone, target_cost=target_cost, target_alone=np.inf)

    def best_singles(self) -> list[int]:
        """Nodes by the cost per token of the best single drafter that each makes."""
        alone = self.target_cost + self.target_multiplier * self.alone
        return np.argsort(alone.min(1), kind="stable").tolist()


def renewal(survival: Floats, reward: Floats, capped: bool) -> Floats:
    """Expected reward summed over rounds until T tokens are emitted, [..., T (l), T (requested)].

    Args:
        survival: P(at least t accepted) of rounds of draft length l that start at a position,
            [..., T + 1 (l), T + 1 (position), T + 1 (t)]; 1 at t = 0.
        reward: of a round that requests n tokens, broadcast to [..., T + 1 (l), T + 1 (position),
            T + 1 (n)].
        capped: request min(l, requested - have - 1) tokens, as this package's cascade does, so
            that no round overshoots; otherwise always l, as the paper does.
    """
    size = survival.shape[-1] - 1
    lengths = np.arange(1, size + 1)
    shape = np.broadcast_shapes(survival.shape[:-3], reward.shape[:-3])
    reward = np.broadcast_to(reward, (*reward.shape[:-3], size + 1, size + 1, size + 1))
    total = np.zeros((*shape, size, size))
    for requested in range(1, size + 1):
        # What is still to come once so many tokens are emitted; the last: enough.
        value = [np.zeros((*shape, size)) for _ in range(requested + 1)]
        for have in reversed(range(requested)):
            requested_below = np.minimum(lengths, requested - have - 1) if capped else lengths
            here = value[have]
            here += reward[..., lengths, have, requested_below] + value[have + 1]
            # E[value] = value at no token accepted + the change at each further one.
            for t in range(1, requested - have):
                change = value[have + t + 1] - value[have + t]
                here[..., t - 1 :] += survival[..., t:, have, t] * change[..., t - 1 :]
        total[..., requested - 1] = value[0]
    return total


def measured_graph(measured: Measured, batch: int) -> Graph:
    """The graph of what was measured, at one batch size."""
    latencies, acceptance = measured.latencies, measured.acceptance
    models, size = len(latencies.forward) - 1, acceptance.survival.shape[-1] - 1
    draft = [latencies.call(i, measured.role(0, i), batch, 1) for i in range(models)]
    verify = [latencies.calls(i, "verify", batch, size + 1) for i in range(models)]
    graph = build_graph(
        np.array(draft),
        np.stack([*verify, latencies.calls(-1, "target", batch, size + 1)]),
        latencies.call(-1, "plain", batch, 1),
        acceptance,
        capped=True,
    )
    # No other level drafts for a head.
    graph.cost[[graph.order.index(head) for head in measured.reread]] = np.inf
    return graph


def build_graph(
    draft: Floats, verify: Floats, plain: float, acceptance: Acceptance, *, capped: bool
) -> Graph:
    """Edges from latencies and survival tables of M models and the target, which is last.

    Prompt lookups come first and verify nothing; models follow by the time of a drafted token.

    Args:
        draft: time in which a model drafts one token on its own, a lookup all of them [M].
        verify: time in which a model verifies n tokens, [M + 1, T + 1 (n)].
        plain: time in which the target emits one token without speculation.
        capped: whether the last rounds request fewer tokens (see `renewal`). A capped level
            that requests fewer tokens than its drafter's draft length is taken to pay in
            proportion.
    """
    models, size = len(draft), verify.shape[1] - 1
    order = sorted(range(models), key=lambda i: (i not in acceptance.lookups, draft[i]))
    nodes = [*order, models]
    draft, verify = draft[order], verify[nodes]
    survival = acceptance.survival[np.ix_(nodes, nodes)]
    lookups = {order.index(model): table[nodes] for model, table in acceptance.lookups.items()}
    tokens = np.arange(1, size + 1)
    requested = np.arange(size + 1, dtype=np.float64)
    pairs = survival[:-1, :-1]
    cost = renewal(pairs, verify[:-1, None, None, None], capped)
    multiplier = renewal(pairs, requested[None, None, None, None], capped) / tokens[:, None]
    alone = draft[:, None] * tokens
    emitted = np.tril(survival[-1, :-1, :, 0]).sum(-1)[:, 1:]
    target_cost = np.repeat(verify[-1:, 1:], models, axis=0)
    for k, table in lookups.items():
        # One call, whatever its length, and as many tokens to verify as it offers.
        spent = expected_cost(table[:-1], verify[:-1])
        cost[:, k] = renewal(pairs[:, k], spent, capped)
        any_at_all = (requested > 0).astype(np.float64)
        multiplier[:, k] = renewal(pairs[:, k], any_at_all[None, None, None], capped)
        alone[k] = draft[k]
        at_target = expected_cost(table[-1:], verify[-1:])[0]
        target_cost[k] = at_target[tokens, 0, tokens]
    cost[list(lookups)] = np.inf
    cost[np.triu_indices(models)] = np.inf  # a drafter is cheaper than its verifier
    # The paper's graph has no drafter with a longer draft than the level that it drafts for;
    # a capped level that owes j tokens never requests more than j - 1.
    useless = tokens[:, None] >= tokens if capped else tokens[:, None] > tokens
    cost[:, :, useless] = np.inf
    multiplier[:, :, useless] = 1.0
    return Graph(
        order=tuple(order),
        cost=cost,
        multiplier=multiplier,
        alone=alone,
        target_cost=target_cost / emitted,
        target_multiplier=1.0 / emitted,
        target_alone=plain,
    )


def expected_cost(joint: Floats, verify: Floats) -> Floats:
    """Expected time to verify what a lookup offers when n tokens are requested.

    From P [M, T + 1 (l), T + 1 (position), T + 1 (offered), T + 1 (accepted)] and the time in which
    a model verifies n tokens [M, T + 1 (n)] to float64 [M, T + 1 (l), T + 1 (position), T + 1 (n)].
    """
    spent = [
        np.einsum("mlpo,mo->mlp", folded(joint, n).sum(-1), verify[:, : n + 1])
        for n in range(verify.shape[1])
    ]
    return np.stack(spent, axis=-1)


def solve(
    graph: Graph, k: int = 1, max_levels: int | None = None, *, exactly: bool = False
) -> list[tuple[Selection, float]]:
    """The k cheapest cascades with their costs, ascending; no speculation counts as one.

    At most (`exactly`: just) `max_levels` drafters in a cascade; None: as many as there are.
    """
    if k < 1:
        raise UserError(f"k is {k}: ask for at least one cascade.")
    models, size = graph.alone.shape
    # values[i, j, r]: r-th cheapest way in which node i passes on j + 1 tokens.
    values = np.full((models, size, k), np.inf)
    values[..., 0] = graph.alone
    pointers: list[NDArray[np.int64]] = [np.full((models, size, k), -1)]
    for _ in range(1, models if max_levels is None else max_levels):
        deeper, pointer = _one_level_deeper(graph, values, or_alone=not exactly)
        if np.array_equal(deeper, values):
            break
        values = deeper
        pointers.append(pointer)
    found = [] if exactly and max_levels else [(Selection((), ()), graph.target_alone)]
    if max_levels != 0:
        total = graph.target_cost[..., None] + graph.target_multiplier[..., None] * values
        for state in np.argsort(total, axis=None, kind="stable")[:k].tolist():
            if np.isfinite(total.flat[state]):
                i, j, r = (int(x) for x in np.unravel_index(state, total.shape))
                found.append((_trace(graph, pointers, i, j, r), float(total.flat[state])))
    return sorted(found, key=lambda item: item[1])[:k]


def _one_level_deeper(
    graph: Graph, below: Floats, or_alone: bool
) -> tuple[Floats, NDArray[np.int64]]:
    """k cheapest ways per state, given those of the drafters below or, `or_alone`, without any.

    Values and pointers [M, T, k]; a pointer is the flat index of a state of `below`, or -1.
    """
    models, size, k = below.shape
    alone = graph.alone if or_alone else np.full_like(graph.alone, np.inf)
    values = np.full_like(below, np.inf)
    pointers = np.full(below.shape, -1, dtype=np.int64)
    values[..., 0] = alone
    for i in range(1, models):
        # edges [i * T (drafter and its draft length), T (tokens passed on)]
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


def _trace(graph: Graph, pointers: list[NDArray[np.int64]], i: int, j: int, r: int) -> Selection:
    levels, draft_lengths = [], []
    shape = pointers[0].shape
    for pointer in reversed(pointers):
        levels.append(graph.order[i])
        draft_lengths.append(j + 1)
        if pointer[i, j, r] < 0:
            break
        i, j, r = (int(x) for x in np.unravel_index(pointer[i, j, r], shape))
    return Selection(tuple(reversed(levels)), tuple(reversed(draft_lengths)))
