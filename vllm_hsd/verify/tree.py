"""Verification of draft trees.

`traversal` extends capped branch resampling to trees (DESIGN.md; a chain is the tree with one
child everywhere); `recursive_rejection` is SpecInfer's rule (Miao et al., arXiv:2305.09781).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_hsd.verify.inputs import (
    check_like,
    check_probs_dtype,
    check_rows,
    read_tokens,
)
from vllm_hsd.verify.residual import (
    BlockedCDF,
    acceptance_probability,
    is_normalized,
    probability_ratios,
    residual_rows,
)

TREE_METHODS = ("traversal", "recursive_rejection", "greedy")
ROOT = -1


@dataclass(frozen=True)
class Tree:
    """Draft tokens in draw order.

    A token that one parent drew twice is listed twice; both nodes stand for the same path, and
    what was drawn below either hangs below the first of them.

    Args:
        parents: for every node the number of its parent, an earlier node, or -1 for the root.
        tokens: for every node its token id.
    Raises:
        ValueError: lengths differ or a parent is not an earlier node.
    """

    parents: Sequence[int]
    tokens: Sequence[int]
    children: dict[int, list[int]] = field(init=False, repr=False)  # of first nodes and the root
    first: list[int] = field(init=False, repr=False)  # the first sibling with the same token

    def __post_init__(self):
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify a draft tree, losslessly: the tokens emitted follow the target's law.

    An unusable row ends the tree there: a proposal row before its token and the later siblings,
    a target row after its node, which then has no children and is followed by no final token.

    Args:
        target_probs: [N + 1, V] float32 or float64; row 0 is the target's law at the root, row
            i + 1 its law after node i. For `greedy` probabilities or logits.
        draft_probs: [N, V], for every node the law its token was drawn from (see draw_iid,
            draw_without_replacement), or None when all are one-hot (see top_k). Not read by
            `greedy`.
        tree: N nodes in draw order.
        method: "traversal", "recursive_rejection" or "greedy".
        generator: on the rows' device; N + 1 uniforms are drawn from it, whatever happens.
    Returns:
        (token_ids int64 [m + 1], path int64 [m]): the accepted nodes' tokens and one more token
        (none after an unusable row), and the accepted nodes' numbers.
    Raises:
        ValueError: arguments that do not fit together, a token outside the vocabulary, or an
            unusable root row; names the argument and the first offending row.
    """
    rows = TreeRows(target_probs, draft_probs, tree, method)
    if not rows.target_ok[0]:
        raise ValueError(
            "target_probs row 0, the root, is not usable (finite, not negative, sum 1 within 1e-3)."
        )
    if method == "greedy":
        node, token = greedy_end(rows)
    else:
        coins = torch.rand(
            len(tree) + 1, dtype=torch.float64, device=target_probs.device, generator=generator
        )
        decide = _traverse if method == "traversal" else _descend
        node, row = decide(rows, coins.tolist())
        token = int(BlockedCDF(row).draw(coins[-1:])) if rows.target_ok[node + 1] else None
    path = rows.path_to(node)
    tokens = [tree.tokens[n] for n in path] + ([] if token is None else [token])
    device = target_probs.device
    return torch.tensor(tokens, device=device), torch.tensor(path, dtype=torch.int64, device=device)


class TreeRows:
    """A tree with its rows, checked; nodes are numbers, -1 is the root."""

    def __init__(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        tree: Tree,
        method: str,
    ):
        if method not in TREE_METHODS:
            raise ValueError(f"method must be one of {', '.join(TREE_METHODS)}, got {method!r}.")
        check_rows("target_probs", target_probs, len(tree) + 1, "the root and every node")
        if method == "greedy":
            draft_probs = None
            self.target_ok = torch.isfinite(target_probs.amax(-1)).tolist()
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
        self.target_probs, self.draft_probs, self.tree, self.ids = (
            target_probs,
            draft_probs,
            tree,
            ids,
        )

    def children(self, node: int) -> list[int]:
        """Usable children in draw order, duplicates included."""
        if not self.target_ok[node + 1]:
            return []
        children = self.tree.children[node]
        usable = [self.draft_ok[c] for c in children]
        return children[: usable.index(False)] if False in usable else children

    def path_to(self, node: int) -> list[int]:
        """The nodes from below the root down to ``node``."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            parent = self.tree.parents[node]
            node = parent if parent == ROOT else self.tree.first[parent]
        return path[::-1]

    def target_row(self, node: int) -> torch.Tensor:
        """A view [1, V]."""
        return self.target_probs[node + 1 : node + 2]

    def token_ratio(self, row: torch.Tensor, child: int) -> np.ndarray:
        """row(x) / q(x) of the child's token: float64 [1]."""
        token = self.tree.tokens[child]
        target = row[:, token].double().cpu().numpy()
        if self.draft_probs is None:
            return target
        return probability_ratios(
            target, self.draft_probs[child : child + 1, token].double().cpu().numpy()
        )

    def without(self, row: torch.Tensor, a: np.ndarray, child: int) -> torch.Tensor:
        """max(a * row - q, 0) with the child's proposal row: a new [1, V] tensor."""
        if self.draft_probs is None:
            return residual_rows(row.clone(), a, None, self.ids[child : child + 1])
        return residual_rows(row.clone(), a, self.draft_probs[child : child + 1])


def traversal_stops(rows: TreeRows) -> Iterator[tuple[int, float, torch.Tensor]]:
    """The nodes at which the traversal may end, in the order it comes by.

    Yields:
        (node, probability that it ends here if it gets here, row [1, V] of the next token,
        unnormalised).
    """

    def visit(node: int, a: np.ndarray) -> Iterator[tuple[int, float, torch.Tensor]]:
        # The node's law T is row / scale; it is never written out normalised.
        row, scale = rows.target_row(node), np.ones(1)
        for child in rows.children(node):
            if rows.tree.first[child] == child:
                below = np.minimum(a / scale * rows.token_ratio(row, child), 1.0)
                if below > 0:
                    yield from visit(child, below)
            left = rows.without(row, a / scale, child)
            mass = BlockedCDF(left).total.cpu().numpy()
            a = acceptance_probability(a, mass)
            if mass > 0:
                row, scale = left, mass
        yield node, 1.0 if node == ROOT else float(a[0]), row

    return visit(ROOT, np.ones(1))


def rejection_steps(rows: TreeRows, node: int) -> Iterator[tuple[int | None, float, torch.Tensor]]:
    """What recursive rejection does at a node, in order.

    Yields:
        (child, probability that it is accepted if it is tried, row) for every child in draw order,
        then (None, 1, row [1, V] of the next token, unnormalised).
    """
    row, scale = rows.target_row(node), np.ones(1)
    for child in rows.children(node):
        accept = np.minimum(rows.token_ratio(row, child) / scale, 1.0)
        yield rows.tree.first[child], float(accept[0]), row
        left = rows.without(row, 1 / scale, child)
        mass = BlockedCDF(left).total.cpu().numpy()
        if mass > 0:
            row, scale = left, mass
    yield None, 1.0, row


def greedy_end(rows: TreeRows) -> tuple[int, int | None]:
    """(last node of the target's argmax path, the token after it if its row is usable)."""
    node = ROOT
    while rows.target_ok[node + 1]:
        token = int(rows.target_row(node).argmax())
        below = [c for c in rows.children(node) if rows.tree.tokens[c] == token]
        if not below:
            return node, token
        node = below[0]
    return node, None


def _traverse(rows: TreeRows, coins: list[float]) -> tuple[int, torch.Tensor]:
    for node, stop, row in traversal_stops(rows):
        if node == ROOT or coins[node] < stop:
            return node, row
    raise AssertionError("the root always ends the traversal")


def _descend(rows: TreeRows, coins: list[float]) -> tuple[int, torch.Tensor]:
    node = ROOT
    while True:
        for i, (child, accept, row) in enumerate(rejection_steps(rows, node)):
            if child is None:
                return node, row
            if coins[rows.children(node)[i]] < accept:
                node = child
                break


def draw_iid(
    row: torch.Tensor, k: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """k independent draws from a law [V]: (token ids int64 [k], proposal rows [k, V])."""
    rows = row.expand(k, -1)
    coins = torch.rand(k, dtype=torch.float64, device=row.device, generator=generator)
    return BlockedCDF(rows).draw(coins), rows


def draw_without_replacement(
    row: torch.Tensor, k: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """k different tokens, each drawn from the law [V] renormalised without the earlier ones.

    Returns:
        (token ids int64 [k], proposal rows [k, V]).
    Raises:
        ValueError: the law has fewer than k tokens.
    """
    if (support := int((row > 0).sum())) < k:
        raise ValueError(f"k is {k}, but row has only {support} tokens of positive probability.")
    coins = torch.rand(k, 1, dtype=torch.float64, device=row.device, generator=generator)
    rows = row.repeat(k, 1)
    tokens = torch.empty(k, dtype=torch.int64, device=row.device)
    for i in range(k):
        mass = BlockedCDF(rows[i : i + 1])
        tokens[i] = mass.draw(coins[i])[0]
        rows[i] /= mass.total.to(row.dtype)
        rows[i + 1 :, tokens[i]] = 0
    return tokens, rows


def top_k(row: torch.Tensor, k: int) -> torch.Tensor:
    """The k likeliest tokens of a law [V], int64 [k]; their proposal rows are one-hot."""
    return row.topk(k).indices
