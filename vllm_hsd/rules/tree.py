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
from itertools import takewhile

import torch

from vllm_hsd.rules.residual import acceptance_probability, draw, is_normalized, ratio, residual

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
    target: torch.Tensor,
    draft: torch.Tensor,
    tree: Tree,
    uniforms: Sequence[float],
    *,
    method: str = "traversal",
) -> tuple[list[int], list[int]]:
    """Verify a draft tree without changing the target's distribution.

    A row that is not normalized (not finite, negative, or a sum off 1 by 1e-3) ends the tree
    there: a proposal row before its token and the later siblings, a target row after its node,
    which then has no children and is followed by no token. Where the root's target row is not
    normalized, its argmax is emitted, NaN counting as the maximum: what vLLM's own sampler gives.

    Args:
        target: floating [N + 1, V]; row 0 is the target distribution at the root, row i + 1 the one
            after node i.
        draft: [N, V], for every node the distribution that its token was drawn from (see `draw_iid`
            and `draw_without_replacement`); one-hot for a point mass.
        tree: N nodes in draw order.
        uniforms: N + 1 in [0, 1): one for each node, then one for the next token.
        method: "traversal" or "recursive_rejection".

    Returns:
        (tokens of the accepted nodes and one more, none after a row that is not normalized; numbers
        of the accepted nodes).

    Raises:
        ValueError: there is no such method.
    """
    decide = {"traversal": _traverse, "recursive_rejection": _descend}.get(method)
    if decide is None:
        raise ValueError(f"method is {method!r}, must be traversal or recursive_rejection.")
    rows = TreeRows(target, draft, tree)
    node, row = decide(rows, uniforms)
    path = rows.path_to(node)
    tokens = [tree.tokens[n] for n in path]
    if rows.target_ok[node + 1]:
        tokens.append(draw(row, uniforms[-1]))
    elif node == ROOT:
        tokens.append(int(row.argmax()))
    return tokens, path


class TreeRows:
    """A tree with its probability rows; nodes are numbers, -1 is the root.

    Arguments as for `verify_tree`.
    """

    def __init__(self, target: torch.Tensor, draft: torch.Tensor, tree: Tree) -> None:
        self.target, self.draft, self.tree = target, draft, tree
        self.target_ok = [is_normalized(row) for row in target]
        self.draft_ok = [is_normalized(row) for row in draft]

    def children(self, node: int) -> list[int]:
        """Children in draw order up to the first invalid proposal, duplicates included."""
        if not self.target_ok[node + 1]:
            return []
        return list(takewhile(self.draft_ok.__getitem__, self.tree.children[node]))

    def path_to(self, node: int) -> list[int]:
        """The nodes from the root (excluded) down to ``node``."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            parent = self.tree.parents[node]
            node = parent if parent == ROOT else self.tree.first[parent]
        return path[::-1]

    def ratio(self, row: torch.Tensor, child: int) -> float:
        """row(x) / q(x) of the child's token x."""
        return ratio(row, self.draft[child], self.tree.tokens[child])


def traversal_stops(rows: TreeRows) -> Iterator[tuple[int, float, torch.Tensor]]:
    """The nodes at which Traversal Verification may end, in the order it visits them.

    Yields:
        (node, probability that it ends here if it gets here, row [V] of the next token,
        unnormalized).
    """

    def visit(node: int, a: float) -> Iterator[tuple[int, float, torch.Tensor]]:
        # The node's distribution is row / scale; it is never written out normalized.
        row, scale = rows.target[node + 1], 1.0
        for child in rows.children(node):
            if rows.tree.first[child] == child:
                below = min(a / scale * rows.ratio(row, child), 1.0)
                if below > 0:
                    yield from visit(child, below)
            rest, mass = residual(a / scale, row, rows.draft[child])
            a = acceptance_probability(a, mass)
            if mass > 0:
                row, scale = rest, mass
        yield node, 1.0 if node == ROOT else a, row

    return visit(ROOT, 1.0)


def rejection_steps(rows: TreeRows, node: int) -> Iterator[tuple[int | None, float, torch.Tensor]]:
    """The steps of recursive rejection at a node, in order.

    Yields:
        (child, probability that it is accepted if it is tried, row) for every child in draw order,
        then (None, 1, row [V] of the next token, unnormalized).
    """
    row, scale = rows.target[node + 1], 1.0
    for child in rows.children(node):
        yield rows.tree.first[child], min(rows.ratio(row, child) / scale, 1.0), row
        rest, mass = residual(1 / scale, row, rows.draft[child])
        if mass > 0:
            row, scale = rest, mass
    yield None, 1.0, row


def _traverse(rows: TreeRows, uniforms: Sequence[float]) -> tuple[int, torch.Tensor]:
    for node, stop, row in traversal_stops(rows):
        if node == ROOT or uniforms[node] < stop:
            return node, row
    raise AssertionError("the root always ends the traversal")


def _descend(rows: TreeRows, uniforms: Sequence[float]) -> tuple[int, torch.Tensor]:
    node = ROOT
    while True:
        for i, (child, accept, row) in enumerate(rejection_steps(rows, node)):
            if child is None:
                return node, row
            if uniforms[rows.children(node)[i]] < accept:
                node = child
                break


def draw_iid(row: torch.Tensor, uniforms: Sequence[float]) -> tuple[list[int], torch.Tensor]:
    """k independent draws from probabilities [V]: (token ids, proposals [k, V])."""
    return [draw(row, u) for u in uniforms], row.expand(len(uniforms), -1)


def draw_without_replacement(
    row: torch.Tensor, uniforms: Sequence[float]
) -> tuple[list[int], torch.Tensor]:
    """k different tokens, each drawn from probabilities [V] renormalized without earlier ones.

    Returns:
        (token ids, proposals [k, V]).

    Raises:
        ValueError: fewer than k tokens have positive probability.
    """
    if (support := int((row > 0).sum())) < len(uniforms):
        raise ValueError(
            f"k is {len(uniforms)}, but row has only {support} tokens of positive probability."
        )
    tokens: list[int] = []
    rows = row.repeat(len(uniforms), 1)
    for own, u in zip(rows, uniforms, strict=True):
        own[tokens] = 0
        own /= own.double().sum().to(own)
        tokens.append(draw(own, u))
    return tokens, rows
