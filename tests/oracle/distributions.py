"""Exact distributions of the verifiers' results for a given draft, in float64.

They are built from the quantities that the samplers of `vllm_hsd.rules` use themselves.
"""

from collections.abc import Sequence

import torch

from vllm_hsd.rules.chain import chain_stops
from vllm_hsd.rules.residual import is_normalized
from vllm_hsd.rules.tree import ROOT, Tree, TreeRows, rejection_steps, traversal_stops


def chain_distribution(
    target: torch.Tensor, draft: torch.Tensor, token_ids: Sequence[int], *, method: str = "block"
) -> torch.Tensor:
    """[n + 1, V], P(t tokens are accepted and v follows | draft); arguments of verify_chain."""
    assert all(map(is_normalized, [*target, *draft]))
    stops = chain_stops(target, draft, token_ids, method=method)
    h = torch.tensor([h for h, _ in stops], dtype=torch.float64)
    if method == "standard":
        ends = h.cumprod(0) * torch.cat((1 - h[1:], torch.ones(1)))
    else:
        ends = h * torch.cat((1 - h[1:], torch.ones(1))).flip(0).cumprod(0).flip(0)
    return torch.stack([end * row / row.sum() for end, (_, row) in zip(ends, stops, strict=True)])


def tree_distribution(
    target: torch.Tensor, draft: torch.Tensor, tree: Tree, *, method: str = "traversal"
) -> torch.Tensor:
    """[N + 1, V], P(the accepted path ends there and v follows | tree); arguments of verify_tree.

    Row 0 is the path that ends at the root, row i + 1 the one that ends at node i. The row of a
    repeated sibling is zero: its path is that of the first one.
    """
    rows = TreeRows(target, draft, tree)
    assert all([*rows.target_ok, *rows.draft_ok])
    distribution = torch.zeros_like(target)
    if method == "traversal":
        remaining = 1.0
        for node, stop, row in traversal_stops(rows):
            distribution[node + 1] = remaining * stop * row / row.sum()
            remaining *= 1 - stop
        return distribution
    reached = {ROOT: 1.0}
    for node in range(ROOT, len(tree)):
        remaining = reached.get(node, 0.0)
        if remaining == 0:
            continue
        for child, accept, row in rejection_steps(rows, node):
            if child is None:
                distribution[node + 1] = remaining * row / row.sum()
            else:
                reached[child] = reached.get(child, 0.0) + remaining * accept
                remaining *= 1 - accept
    return distribution
