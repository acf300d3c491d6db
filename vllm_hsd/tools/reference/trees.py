"""Draft trees of the reference engine, drawn from one drafter; serving does not use this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from vllm_hsd.rules import Tree, draw_iid, draw_without_replacement
from vllm_hsd.rules.residual import point_masses
from vllm_hsd.rules.tree import ROOT
from vllm_hsd.tools.reference.batch import Level
from vllm_hsd.tools.reference.request import Request

DRAWS = ("iid", "without_replacement", "top_k")
VERIFIERS = ("traversal", "recursive_rejection")


@dataclass(frozen=True)
class TreeOptions:
    """The shape of a draft tree and how it is drawn and verified.

    Attributes:
        widths: children of every node, by depth; (K, 1, 1) is K drafts of three tokens.
        draw: how siblings are drawn: "iid", "without_replacement" (fewer where fewer tokens have
            positive probability) or "top_k", the likeliest tokens at any temperature, as point
            masses.
        verifier: "traversal" or "recursive_rejection", see `rules.verify_tree`.
        temperature_scale: factor on the request's temperature for the drafter's distribution.

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
    """A drawn tree of N nodes.

    Attributes:
        paths: for every node the tokens from the root to it.
        probs: [N, V], what each token was drawn from.
        forwards: forward passes of the drafter.
    """

    tree: Tree
    paths: list[tuple[int, ...]]
    probs: torch.Tensor
    forwards: int


def grow(drafter: Level, options: TreeOptions, request: Request, depth: int) -> DraftTree:
    """Draw the first `depth` generations of a tree; the request's eos has no children."""
    logits_after: dict[tuple[int, ...], torch.Tensor] = {}
    parents: list[int] = []
    paths: list[tuple[int, ...]] = []
    probs: list[torch.Tensor] = []
    generation: list[tuple[int, tuple[int, ...]]] = [(ROOT, ())]
    for width in options.widths[:depth]:
        children = []
        for parent, path in generation:
            if path not in logits_after:
                logits_after[path] = request.logits_along(drafter, 0, path)[-1:]
            tokens, drawn_from = _siblings(logits_after[path], width, options.draw, request)
            for i, token in enumerate(tokens):
                if token != request.eos:
                    children.append((len(parents), (*path, token)))
                parents.append(parent)
                paths.append((*path, token))
                probs.append(drawn_from[i])
        generation = children
    tree = Tree(parents, [path[-1] for path in paths])
    return DraftTree(
        tree, paths, torch.stack(probs) if probs else torch.empty(0), len(logits_after)
    )


def target_logits(target: Level, model: int, draft: DraftTree, request: Request) -> torch.Tensor:
    """[N + 1, V] logits of the target at the root and at every node, one leaf path per forward."""
    inner = {path[:-1] for path in draft.paths}
    leaves = [path for path in dict.fromkeys(draft.paths) if path not in inner] or [()]
    at: dict[tuple[int, ...], torch.Tensor] = {}
    for leaf in leaves:
        logits = request.logits_along(target, model, leaf)
        at.update((leaf[:t], logits[t]) for t in range(len(leaf) + 1))
    return torch.stack([at[path] for path in ((), *draft.paths)])


def _siblings(
    logits: torch.Tensor, width: int, draw: str, request: Request
) -> tuple[list[int], torch.Tensor]:
    """Tokens in draw order and their proposals [k, V]."""
    if draw == "top_k":
        likeliest = logits[0].topk(min(width, logits.shape[1])).indices
        return likeliest.tolist(), point_masses(likeliest, logits.shape[1])
    row = request.probs(logits, 0)[0]
    if draw == "iid":
        return draw_iid(row, request.draw(width, 0))
    return draw_without_replacement(row, request.draw(min(width, int((row > 0).sum())), 0))
