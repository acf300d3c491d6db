"""Exact distributions of the verifiers' results for a given draft, in float64.

They are built from the quantities that the samplers of `vllm_hsd.rules` use themselves.
"""

import numpy as np
import torch

from vllm_hsd.rules.chain import bonus_cdf, prefix_probabilities, recovered_cdf
from vllm_hsd.rules.inputs import ChainBatch, read_chain_batch
from vllm_hsd.rules.residual import CDF, is_normalized
from vllm_hsd.rules.tree import ROOT, Tree, TreeRows, rejection_steps, traversal_stops


def chain_distribution(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_token_ids: torch.Tensor,
    *,
    method: str = "block",
) -> torch.Tensor:
    """[n + 1, V], P(t tokens are accepted and v follows | draft); as verify_chain, one request."""
    draft = None if draft_probs is None else draft_probs.double()
    n = len(draft_token_ids)
    assert is_normalized(target_probs).all()
    assert draft_probs is None or is_normalized(draft_probs).all()
    batch = read_chain_batch(target_probs.double(), draft, draft_token_ids, [n], method)
    return batch_distribution(batch, method)


def batch_distribution(batch: ChainBatch, method: str) -> torch.Tensor:
    """As `chain_distribution`, of a batch of one request in float64."""
    n, vocabulary = int(batch.lengths[0]), batch.target_probs.shape[1]
    distribution = torch.zeros(n + 1, vocabulary, dtype=torch.float64)
    m = int(np.logical_and.accumulate(batch.tokens[0, :n] >= 0).sum())
    a = prefix_probabilities(batch, np.array([m]), method)[0, :m]
    inner, request = np.arange(m), np.zeros(m, dtype=np.int64)
    if method == "standard":
        recovered, _ = recovered_cdf(batch, request, inner, np.ones(m))
        ends_at = np.append(1.0, a.cumprod()) * np.append(1.0 - a, 1.0)
    else:
        recovered, h = recovered_cdf(batch, request, inner, np.append(1.0, a)[:m])
        h = np.append(h, a[-1:] if m else 1.0)
        later_rejected = np.append(1.0 - h[1:], 1.0)[::-1].cumprod()[::-1]
        ends_at = h * later_rejected
    bonus = bonus_cdf(batch, np.zeros(1, dtype=np.int64), np.array([m]))
    distribution[: m + 1] = torch.cat((_normalized(recovered), _normalized(bonus)))
    distribution[: m + 1] *= torch.from_numpy(ends_at.copy())[:, None]
    return distribution


def tree_distribution(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    tree: Tree,
    *,
    method: str = "traversal",
) -> torch.Tensor:
    """[N + 1, V], P(the accepted path ends there and v follows | tree); arguments of verify_tree.

    Row 0 is the path that ends at the root, row i + 1 the one that ends at node i. The row of a
    repeated sibling is zero: its path is that of the first one.
    """
    draft = None if draft_probs is None else draft_probs.double()
    rows = TreeRows(target_probs.double(), draft, tree, method)
    assert is_normalized(target_probs).all()
    distribution = torch.zeros_like(rows.target_probs)
    if draft_probs is not None:
        assert is_normalized(draft_probs).all()
    if method == "traversal":
        remaining = 1.0
        for node, stop, row in traversal_stops(rows):
            distribution[node + 1] = remaining * stop * _normalized(CDF(row))[0]
            remaining *= 1 - stop
        return distribution
    reached = {ROOT: 1.0}
    for node in range(ROOT, len(tree)):
        remaining = reached.get(node, 0.0)
        if remaining == 0:
            continue
        for child, accept, row in rejection_steps(rows, node):
            if child is None:
                distribution[node + 1] = remaining * _normalized(CDF(row))[0]
            else:
                reached[child] = reached.get(child, 0.0) + remaining * accept
                remaining *= 1 - accept
    return distribution


def _normalized(cdf: CDF) -> torch.Tensor:
    return cdf.rows / cdf.rows.sum(-1, keepdim=True)
