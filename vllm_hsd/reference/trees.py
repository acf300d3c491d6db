"""Drafts that branch: K drafts and trees, drawn from one drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from vllm_hsd.core.levels import Level
from vllm_hsd.reference.request import Request
from vllm_hsd.verify import Tree, draw_iid, draw_without_replacement, top_k

DRAWS = ("iid", "without_replacement", "top_k")
VERIFIERS = ("traversal", "recursive_rejection")


@dataclass(frozen=True)
class TreePlan:
    """The shape of a draft tree and how it is drawn and verified.

    Attributes:
        widths: children of every node, by depth; (K, 1, 1) is K drafts of three tokens.
        draw: how siblings are drawn: "iid", "without_replacement" (fewer where a law has fewer
            tokens) or "top_k", the likeliest tokens at any temperature, with one-hot rows.
        verifier: "traversal" or "recursive_rejection", see `verify.verify_tree`.
        temperature_scale: factor on the request's temperature for the drafter's law.

    Raises:
        ValueError: names the attribute and what it may be.
    """

    widths: tuple[int, ...]
    draw: Literal["iid", "without_replacement", "top_k"] = "iid"
    verifier: Literal["traversal", "recursive_rejection"] = "traversal"
    temperature_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"widths is {self.widths}, must be one number >= 1 for each depth.")
        if self.draw not in DRAWS:
            raise ValueError(f"draw is {self.draw!r}, must be one of {', '.join(DRAWS)}.")
        if self.verifier not in VERIFIERS:
            raise ValueError(f"verifier is {self.verifier!r}, must be {' or '.join(VERIFIERS)}.")
        if self.temperature_scale <= 0:
            raise ValueError(f"temperature_scale is {self.temperature_scale}, must be above 0.")


@dataclass
class DraftTree:
    """A drawn tree: `paths[i]` leads to node i; rows are [N, V], None when all are one-hot."""

    tree: Tree
    paths: list[tuple[int, ...]]
    rows: torch.Tensor | None
    forwards: int


def grow(drafter: Level, plan: TreePlan, request: Request, depth: int) -> DraftTree:
    """Draw the first `depth` generations of a tree; nothing grows below the request's eos."""
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    parents, paths, rows = [], [], []
    generation = [(-1, ())]
    for width in plan.widths[:depth]:
        children = []
        for parent, path in generation:
            if path not in seen:
                seen[path] = request.logits_along(drafter, 0, path)[-1:]
            tokens, drawn_from = _siblings(seen[path], width, plan.draw, request)
            for i, token in enumerate(tokens):
                if token != request.eos:
                    children.append((len(parents), (*path, token)))
                parents.append(parent)
                paths.append((*path, token))
                if drawn_from is not None:
                    rows.append(drawn_from[i])
        generation = children
    tree = Tree(parents, [path[-1] for path in paths])
    return DraftTree(tree, paths, torch.stack(rows) if rows else None, forwards=len(seen))


def target_rows(target: Level, model: int, draft: DraftTree, request: Request) -> torch.Tensor:
    """[N + 1, V] logits of the target at the root and at every node, one path after the other."""
    inner = {path[:-1] for path in draft.paths}
    leaves = [path for path in dict.fromkeys(draft.paths) if path not in inner] or [()]
    at: dict[tuple[int, ...], torch.Tensor] = {}
    for leaf in leaves:
        logits = request.logits_along(target, model, leaf)
        at.update((leaf[:t], logits[t]) for t in range(len(leaf) + 1))
    return torch.stack([at[path] for path in ((), *draft.paths)])


def _siblings(
    logits: torch.Tensor, width: int, draw: str, request: Request
) -> tuple[list[int], torch.Tensor | None]:
    """Tokens in draw order and their proposal rows [k, V], None when they are one-hot."""
    if draw == "top_k":
        return top_k(logits[0], min(width, logits.shape[1])).tolist(), None
    law = request.law(logits, 0)[0]
    if draw == "iid":
        tokens, rows = draw_iid(law, width, request.generator)
    else:
        width = min(width, int((law > 0).sum()))
        tokens, rows = draw_without_replacement(law, width, request.generator)
    return tokens.tolist(), rows
