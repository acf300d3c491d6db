"""Verification of draft trees: by the reference engine, and of several drawn drafts in serving.

`traversal` is Traversal Verification (Weng et al., "Traversal Verification for Speculative Tree
Decoding", arXiv:2505.12398): leaves first, with the acceptance probability of the whole path. On a
tree with one child everywhere it is block verification. Siblings may be drawn without replacement,
as in the paper, independently (a repeated token then only removes its proposal once more), or be
the k likeliest tokens with point masses. `recursive_rejection` is the token-level rule of SpecInfer
(Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative
Inference and Verification", arXiv:2305.09781).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_hsd.rules.chain import argmax_rows
from vllm_hsd.rules.inputs import check_like, check_probs_dtype, check_rows, read_tokens
from vllm_hsd.rules.residual import (
    CDF,
    acceptance_probability,
    is_normalized,
    probability_ratios,
)

TREE_METHODS = ("traversal", "recursive_rejection", "greedy")
ROOT = -1


@dataclass(frozen=True)
class Tree:
    """Draft tokens in draw order.

    A token that one parent drew twice is listed twice. Both nodes are the same path, and the
    children of either are children of the first.

    Args:
        parents: for every node the number of its parent, an earlier node, or -1 for the root.
        tokens: for every node its token id.

    Attributes:
        children: children in draw order, of the root (-1) and of every first node.
        first: for every node the first sibling with the same token.

    Raises:
        ValueError: lengths differ or a parent is not an earlier node.
    """

    parents: Sequence[int]
    tokens: Sequence[int]
    children: dict[int, list[int]] = field(init=False, repr=False)
    first: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.tokens):
            raise ValueError(
                f"parents has {len(self.parents)} entries, tokens {len(self.tokens)}: one for each "
                "node is needed."
            )
        children: dict[int, list[int]] = {ROOT: []}
        first: list[int] = []
        known: dict[tuple[int, int], int] = {}
        for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True)):
            if not ROOT <= parent < node:
                raise ValueError(f"parents[{node}] is {parent}, must be -1 or an earlier node.")
            parent = parent if parent == ROOT else first[parent]
            children[parent].append(node)
            children[node] = []
            first.append(known.setdefault((parent, token), node))
        object.__setattr__(self, "children", children)
        object.__setattr__(self, "first", first)

    def __len__(self) -> int:
        return len(self.tokens)


def verify_tree(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    tree: Tree,
    *,
    method: str = "traversal",
    generator: torch.Generator | None = None,
    uniforms: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify a draft tree without changing the target's distribution.

    A row that is not normalized (not finite, negative, or a sum off 1 by 1e-3) ends the tree
    there: a proposal row before its token and the later siblings, a target row after its node,
    which then has no children and is followed by no token. Where the root's target row is not
    normalized, its argmax is emitted, NaN counting as the maximum: what vLLM's own sampler gives.

    Args:
        target_probs: [N + 1, V] float32 or float64; row 0 is the target distribution at the root,
            row i + 1 the one after node i. For `greedy` probabilities or logits of any floating
            dtype.
        draft_probs: [N, V], for every node the distribution that its token was drawn from (see
            draw_iid, draw_without_replacement), or None when all are point masses.
            Not read by `greedy`.
        tree: N nodes in draw order.
        method: "traversal", "recursive_rejection" or "greedy".
        generator: on the rows' device; N + 1 uniforms are drawn from it in every case, except by
            `greedy`.
        uniforms: float64 [N + 1] in [0, 1) on the rows' device, used instead of the generator: one
            for each node, then one for the next token.

    Returns:
        (token_ids int64 [m + 1], path int64 [m]): tokens of the accepted nodes and one more (none
        after a row that is not normalized), and numbers of the accepted nodes.

    Raises:
        ValueError: arguments that do not fit together, or a token outside the vocabulary; names
            the argument and the first offending entry.
    """
    rows = TreeRows(target_probs, draft_probs, tree, method)
    token: int | None
    if method == "greedy":
        node, token = greedy_end(rows)
    else:
        if uniforms is None:
            uniforms = torch.rand(
                len(tree) + 1, dtype=torch.float64, device=target_probs.device, generator=generator
            )
        decide = _traverse if method == "traversal" else _descend
        node, row = decide(rows, uniforms.tolist())
        token = rows.draw_next(node, row, uniforms[-1:])
    path = rows.path_to(node)
    tokens = [tree.tokens[n] for n in path] + ([] if token is None else [token])
    device = target_probs.device
    return torch.tensor(tokens, device=device), torch.tensor(path, dtype=torch.int64, device=device)


class TreeRows:
    """A tree with its probability rows, checked; nodes are numbers, -1 is the root.

    Arguments and errors as for `verify_tree`.
    """

    def __init__(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        tree: Tree,
        method: str,
    ) -> None:
        if method not in TREE_METHODS:
            raise ValueError(f"method must be one of {', '.join(TREE_METHODS)}, got {method!r}.")
        check_rows("target_probs", target_probs, len(tree) + 1, "the root and every node")
        if method == "greedy":
            draft_probs = None
            # Every row has an argmax.
            self.target_ok = [True] * (len(tree) + 1)
        else:
            check_probs_dtype("target_probs", target_probs)
            self.target_ok = is_normalized(target_probs).tolist()
        self.draft_ok = [True] * len(tree)
        if draft_probs is not None:
            check_rows("draft_probs", draft_probs, len(tree), "every node")
            check_like("draft_probs", draft_probs, target_probs)
            self.draft_ok = is_normalized(draft_probs).tolist()
        ids = torch.as_tensor(tree.tokens, dtype=torch.int64, device=target_probs.device)
        read_tokens("tree.tokens", ids.reshape(-1), len(tree), target_probs, lowest=0)
        self.target_probs, self.draft_probs = target_probs, draft_probs
        self.tree = tree

    def children(self, node: int) -> list[int]:
        """Children in draw order up to the first invalid proposal, duplicates included."""
        if not self.target_ok[node + 1]:
            return []
        children = self.tree.children[node]
        valid = [self.draft_ok[c] for c in children]
        return children[: valid.index(False)] if False in valid else children

    def path_to(self, node: int) -> list[int]:
        """The nodes from the root (excluded) down to ``node``."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            parent = self.tree.parents[node]
            node = parent if parent == ROOT else self.tree.first[parent]
        return path[::-1]

    def target_row(self, node: int) -> torch.Tensor:
        """Target row at ``node``, a view [1, V]."""
        return self.target_probs[node + 1 : node + 2]

    def token_ratio(self, row: torch.Tensor, child: int) -> np.ndarray:
        """row(x) / q(x) of the child's token x: float64 [1]."""
        token = self.tree.tokens[child]
        target = row[:, token].double().cpu().numpy()
        if self.draft_probs is None:
            return target
        return probability_ratios(
            target, self.draft_probs[child : child + 1, token].double().cpu().numpy()
        )

    def residual(self, row: torch.Tensor, a: np.ndarray, child: int) -> torch.Tensor:
        """max(a * row - q, 0) with the child's proposal q: a new [1, V] tensor."""
        rest = row.clone() if a[0] == 1 else row * torch.from_numpy(a).to(row)[:, None]
        if self.draft_probs is None:
            rest[:, self.tree.tokens[child]] = 0
            return rest
        return rest.sub_(self.draft_probs[child : child + 1]).clamp_min_(0)

    def draw_next(self, node: int, row: torch.Tensor, uniform: torch.Tensor) -> int | None:
        """The token after ``node``: the quantile ``uniform`` [1] of row [1, V], if it has one."""
        if self.target_ok[node + 1]:
            return int(CDF(row).draw(uniform))
        return int(argmax_rows(row)[0][0]) if node == ROOT else None


def traversal_stops(rows: TreeRows) -> Iterator[tuple[int, float, torch.Tensor]]:
    """The nodes at which Traversal Verification may end, in the order it visits them.

    Yields:
        (node, probability that it ends here if it gets here, row [1, V] of the next token,
        unnormalized).
    """

    def visit(node: int, a: np.ndarray) -> Iterator[tuple[int, float, torch.Tensor]]:
        # The node's distribution is row / scale; it is never written out normalized.
        row, scale = rows.target_row(node), np.ones(1)
        for child in rows.children(node):
            if rows.tree.first[child] == child:
                below = np.minimum(a / scale * rows.token_ratio(row, child), 1.0)
                if below > 0:
                    yield from visit(child, below)
            residual = rows.residual(row, a / scale, child)
            mass = CDF(residual).total.cpu().numpy()
            a = acceptance_probability(a, mass)
            if mass > 0:
                row, scale = residual, mass
        yield node, 1.0 if node == ROOT else float(a[0]), row

    return visit(ROOT, np.ones(1))


def rejection_steps(rows: TreeRows, node: int) -> Iterator[tuple[int | None, float, torch.Tensor]]:
    """The steps of recursive rejection at a node, in order.

    Yields:
        (child, probability that it is accepted if it is tried, row) for every child in draw order,
        then (None, 1, row [1, V] of the next token, unnormalized).
    """
    row, scale = rows.target_row(node), np.ones(1)
    for child in rows.children(node):
        accept = np.minimum(rows.token_ratio(row, child) / scale, 1.0)
        yield rows.tree.first[child], float(accept[0]), row
        residual = rows.residual(row, 1 / scale, child)
        mass = CDF(residual).total.cpu().numpy()
        if mass > 0:
            row, scale = residual, mass
    yield None, 1.0, row


def greedy_end(rows: TreeRows) -> tuple[int, int]:
    """(last node of the target's argmax path, the argmax after it)."""
    best = argmax_rows(rows.target_probs)[0].tolist()
    node = ROOT
    while True:
        token = best[node + 1]
        below = [c for c in rows.children(node) if rows.tree.tokens[c] == token]
        if not below:
            return node, token
        node = below[0]


def _traverse(rows: TreeRows, uniforms: list[float]) -> tuple[int, torch.Tensor]:
    for node, stop, row in traversal_stops(rows):
        if node == ROOT or uniforms[node] < stop:
            return node, row
    raise AssertionError("the root always ends the traversal")


def _descend(rows: TreeRows, uniforms: list[float]) -> tuple[int, torch.Tensor]:
    node = ROOT
    while True:
        for i, (child, accept, row) in enumerate(rejection_steps(rows, node)):
            if child is None:
                return node, row
            if uniforms[rows.children(node)[i]] < accept:
                node = child
                break


def draw_iid(
    row: torch.Tensor, k: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """k independent draws from probabilities [V]: (token ids int64 [k], proposals [k, V])."""
    rows = row.expand(k, -1)
    uniforms = torch.rand(k, dtype=torch.float64, device=row.device, generator=generator)
    return CDF(rows).draw(uniforms), rows


def draw_without_replacement(
    row: torch.Tensor, k: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """k different tokens, each drawn from probabilities [V] renormalized without earlier ones.

    Returns:
        (token ids int64 [k], proposals [k, V]).

    Raises:
        ValueError: fewer than k tokens have positive probability.
    """
    if (support := int((row > 0).sum())) < k:
        raise ValueError(f"k is {k}, but row has only {support} tokens of positive probability.")
    uniforms = torch.rand(k, 1, dtype=torch.float64, device=row.device, generator=generator)
    rows = row.repeat(k, 1)
    tokens = torch.empty(k, dtype=torch.int64, device=row.device)
    for i in range(k):
        cdf = CDF(rows[i : i + 1])
        tokens[i] = cdf.draw(uniforms[i])[0]
        rows[i] /= cdf.total.to(row.dtype)
        rows[i + 1 :, tokens[i]] = 0
    return tokens, rows
