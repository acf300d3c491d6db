"""Exact laws of what the samplers do with a given draft, from the samplers' own quantities."""

import numpy as np
import torch

from vllm_hsd.verify.chain import (
    bonus_cdf,
    prefix_probabilities,
    recovered_cdf,
    verify_greedy,
)
from vllm_hsd.verify.inputs import check_probs, read_chain_batch
from vllm_hsd.verify.residual import BlockedCDF, prefix_acceptance
from vllm_hsd.verify.tree import ROOT, Tree, TreeRows, rejection_steps, traversal_stops
from vllm_hsd.verify.tree import greedy_end as tree_greedy_end


def chain_distribution(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_token_ids: torch.Tensor,
    *,
    method: str = "block",
) -> torch.Tensor:
    """Exact law of (accepted length, next token) for one draft of n tokens.

    Args:
        target_probs: [n + 1, V]; draft_probs: [n, V] or None; draft_token_ids: [n], as for
            verify_chain with one request.
        method: "block", "standard" or "greedy".
    Returns:
        float64 [n + 1, V]: entry [t, v] is P(t tokens stay and v follows | draft).
    Raises:
        ValueError: as verify_chain, and for every row that is not a law.
    """
    n = draft_token_ids.shape[0]
    batch = read_chain_batch(
        target_probs.double(),
        None if draft_probs is None else draft_probs.double(),
        draft_token_ids,
        [n],
        method,
    )
    check_probs("target_probs", target_probs)
    law = torch.zeros_like(batch.target_probs)
    if method == "greedy":
        token_ids, accepted = verify_greedy(batch)
        law[accepted[0], token_ids[0, accepted[0]]] = 1
        return law
    if draft_probs is not None:
        check_probs("draft_probs", draft_probs)
    m = int(np.logical_and.accumulate(batch.tokens[0] >= 0).sum())
    a = prefix_probabilities(batch, np.array([m]), method)[0, :m]
    inner, request = np.arange(m), np.zeros(m, dtype=np.int64)
    if method == "standard":
        mass, _ = recovered_cdf(batch, request, inner, np.ones(m))
        stops = np.append(1.0, a.cumprod()) * np.append(1.0 - a, 1.0)
    else:
        mass, h = recovered_cdf(batch, request, inner, np.append(1.0, a)[:m])
        h = np.append(h, a[-1:] if m else 1.0)
        later_fail = np.append(1.0 - h[1:], 1.0)[::-1].cumprod()[::-1]
        stops = h * later_fail
    last = bonus_cdf(batch, np.zeros(1, dtype=np.int64), np.array([m]))
    law[: m + 1] = torch.cat((_normalised(mass), _normalised(last)))
    law[: m + 1] *= torch.from_numpy(stops.copy()).to(law)[:, None]
    return law


def tree_distribution(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    tree: Tree,
    *,
    method: str = "traversal",
) -> torch.Tensor:
    """Exact law of (end of the accepted path, next token) for one draft tree of N nodes.

    Args:
        target_probs: [N + 1, V]; draft_probs: [N, V] or None; tree; method: as for verify_tree.
    Returns:
        float64 [N + 1, V]: row 0 is the path that ends at the root, row i + 1 the one that ends at
        node i; a repeated sibling's row is zero, its path is that of the first one.
    Raises:
        ValueError: as verify_tree, and for every row that is not a law.
    """
    draft = None if draft_probs is None else draft_probs.double()
    rows = TreeRows(target_probs.double(), draft, tree, method)
    check_probs("target_probs", target_probs)
    law = torch.zeros_like(rows.target_probs)
    if method == "greedy":
        node, token = tree_greedy_end(rows)
        law[node + 1, token] = 1
        return law
    if draft_probs is not None:
        check_probs("draft_probs", draft_probs)
    if method == "traversal":
        left = 1.0
        for node, stop, row in traversal_stops(rows):
            law[node + 1] = left * stop * _normalised(BlockedCDF(row))[0]
            left *= 1 - stop
        return law
    reached = {ROOT: 1.0}
    for node in range(ROOT, len(tree)):
        left = reached.get(node, 0.0)
        if left == 0:
            continue
        for child, accept, row in rejection_steps(rows, node):
            if child is None:
                law[node + 1] = left * _normalised(BlockedCDF(row))[0]
            else:
                reached[child] = reached.get(child, 0.0) + left * accept
                left *= 1 - accept
    return law


def expected_tokens(rho: torch.Tensor, *, method: str = "block") -> torch.Tensor:
    """Mean tokens per verification call, 1 + sum_t E[a_t], from recorded ratios.

    Args:
        rho: [n_samples, max_n], p(x) / q(x) along drafts sampled from q.
        method: "block" or "standard".
    Returns:
        float64 [max_n + 1]: entry n is the mean for drafts of n tokens.
    Raises:
        ValueError: rho is not 2-D, is empty or has an entry that is not a finite number >= 0.
    """
    if method not in ("block", "standard"):
        raise ValueError(f"method must be hierarchical or tokenwise, got {method!r}.")
    if rho.ndim != 2 or rho.shape[0] == 0:
        raise ValueError(f"rho must have shape [n_samples, max_n], got {list(rho.shape)}.")
    values = rho.double().cpu().numpy()
    bad = ~(np.isfinite(values) & (values >= 0)).all(1)
    if bad.any():
        raise ValueError(f"rho row {int(bad.argmax())} is not made of finite numbers >= 0.")
    stays = prefix_acceptance(values, method=method)
    if method == "standard":
        stays = stays.cumprod(-1)
    tokens = np.concatenate(([1.0], 1 + stays.mean(0).cumsum()))
    return torch.from_numpy(tokens).to(rho.device)


def _normalised(mass: BlockedCDF) -> torch.Tensor:
    return mass.rows / mass.rows.sum(-1, keepdim=True)
