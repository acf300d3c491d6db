"""Several drawn drafts of each request, verified by the tree kernels in one call for the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_hsd.kernels.tree_verify import verify_tree
from vllm_hsd.verify.branches import DrawnRows, VerifiedRows
from vllm_hsd.verify.tree import ROOT, Tree


def verify_drawn_trees(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    rows: Sequence[Sequence[list[int]]],
    nodes: int,
    seeds: np.ndarray,
    draws: np.ndarray,
    level: int,
) -> list[VerifiedRows]:
    """Traversal Verification as `verify.branches.verify_rows` with "block", of n requests.

    Args:
        target_probs: [T, V] float32 on the device, the target's rows of every request after one
            another, each as `verify_rows` takes them.
        draft_probs: [D, V] float32, what every draft token was drawn from, in the same order.
        rows: of every request, R drafts of token ids.
        nodes: most tokens of a request's rows; kernels are compiled for it.
        seeds, draws: [n] int64; a request takes the draws from its own one on, `nodes` + 1.
        level: whose uniforms are used, see `verify.rng`.

    Returns:
        What the rows of every request come to.
    """
    trees, device = [DrawnRows.of(own) for own in rows], target_probs.device
    shape = len(trees), nodes
    tokens, parents = np.full(shape, -1), np.full(shape, ROOT)
    of_target = np.zeros((len(trees), nodes + 1), dtype=np.int64)
    of_draft = np.zeros_like(of_target)
    target_start = draft_start = 0
    for i, (tree, own) in enumerate(zip(trees, rows, strict=True)):
        size = len(tree.tokens)
        tokens[i, :size] = tree.tokens
        of_target[i, : size + 1] = target_start + np.array(tree.rows)
        for parent, children in Tree(tree.parents, tree.tokens).children.items():
            parents[i, children] = parent
            if children:
                of_draft[i, parent + 1] = draft_start + children[0]
        target_start, draft_start = target_start + size + len(own), draft_start + size

    def logits(probs: torch.Tensor, index: np.ndarray) -> torch.Tensor:
        found = probs.index_select(0, torch.from_numpy(index.ravel()).to(device)).log_()
        return found.view(*index.shape, -1)

    result = verify_tree(
        logits(target_probs, of_target),
        logits(draft_probs, of_draft),
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(parents).to(device),
        torch.ones(len(trees), device=device),
        torch.from_numpy(seeds).to(device),
        torch.from_numpy(draws).to(device),
        level=level,
    )
    emitted, path = result.token_ids.tolist(), result.path.tolist()
    counts = zip(result.num_emitted.tolist(), result.num_accepted.tolist(), strict=True)
    return [
        tree.verified(emitted[i][:count], path[i][:accepted])
        for i, (tree, (count, accepted)) in enumerate(zip(trees, counts, strict=True))
    ]
