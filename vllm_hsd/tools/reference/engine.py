"""Speculative decoding with Hugging Face models, one request at a time: slow, short, exact.

Serving does not use this engine. It is the reference for the vLLM path, and it hosts what vLLM's
runners cannot: draft trees, K drafts, encoder-decoders. It runs `tools.reference.cascade` and
`vllm_hsd.rules` with probabilities in float64: single drafts, cascades of any depth (with entropy-
based early stopping, several rounds and horizontal tokens), K drafts and trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_hsd.cascade.counters import Count, LevelCounts
from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.rules import verify_tree
from vllm_hsd.rules.chain import METHODS
from vllm_hsd.tools.lookup_level import LookupLevel
from vllm_hsd.tools.reference.batch import Level
from vllm_hsd.tools.reference.cascade import Cascade
from vllm_hsd.tools.reference.drafts import DraftStore
from vllm_hsd.tools.reference.request import ONLY, Request
from vllm_hsd.tools.reference.trees import TreeOptions, grow, target_logits


@dataclass
class ReferenceAnswer:
    """The tokens of one request and counts of how they were generated.

    Attributes:
        token_ids: the continuation, eos included.
        target_calls: verifications by the target.
        drafted, accepted: draft tokens that the target verified, and that it accepted.
        counts: per level, cheapest first; for a tree `drafted` counts its nodes.
    """

    token_ids: list[int] = field(default_factory=list)
    target_calls: int = 0
    drafted: int = 0
    accepted: int = 0
    counts: LevelCounts = field(default_factory=lambda: LevelCounts.zeros(0))

    @property
    def block_efficiency(self) -> float:
        """Tokens emitted per target call."""
        return len(self.token_ids) / self.target_calls


class ReferenceEngine:
    """A target with a cascade below it, or with one drafter that draws trees.

    Args:
        target: the model whose distribution is kept, e.g. a `HuggingFaceLevel`.
        levels: drafters, cheapest first; none for plain decoding.
        options: one per level; the draft length of the last one is that of the target's drafts.
        verifier: "block" or "standard", how the target verifies a cascade's draft.
        horizontal_tokens: see `Cascade`.
        draft_tree: of the single level, without `options`, `verifier` and `horizontal_tokens`.

    Raises:
        ValueError: arguments that do not fit together.
    """

    def __init__(
        self,
        target: Level,
        levels: Sequence[Level | LookupLevel] = (),
        options: Sequence[LevelOptions] = (),
        *,
        verifier: str = "block",
        horizontal_tokens: int = 0,
        draft_tree: TreeOptions | None = None,
    ) -> None:
        if draft_tree is None and len(levels) != len(options):
            raise ValueError(f"options has {len(options)} entries for {len(levels)} levels.")
        if verifier not in METHODS:
            raise ValueError(f"verifier is {verifier!r}, must be one of {', '.join(METHODS)}.")
        if horizontal_tokens and len(levels) == 1 and draft_tree is None:
            raise ValueError("horizontal_tokens continue the top level with level 0: give two.")
        for i, level in enumerate(levels):
            theirs = getattr(level, "encoder_decoder", None)
            if theirs is not None and theirs != getattr(target, "encoder_decoder", None):
                raise ValueError(
                    f"levels[{i}] and the target must both be encoder-decoders or both decoders."
                )
        self.tree_drafter: tuple[Level, TreeOptions] | None = None
        if draft_tree is not None:
            if len(levels) != 1 or options or horizontal_tokens:
                raise ValueError(
                    "draft_tree needs exactly one level, no options and no horizontal_tokens."
                )
            if isinstance(levels[0], LookupLevel):
                raise ValueError("draft_tree needs a level with probabilities, not a lookup.")
            self.tree_drafter = levels[0], draft_tree
            scale = draft_tree.temperature_scale
            options = [LevelOptions(len(draft_tree.widths), temperature_scale=scale)]
        self.target, self.verifier = target, verifier
        self.cascade = Cascade(levels, options, 1, horizontal_tokens) if levels else None
        self.levels = [] if self.cascade is None else self.cascade.levels
        self.counts = LevelCounts.zeros(0) if self.cascade is None else self.cascade.counts
        self.scales = [option.temperature_scale for option in options]
        self.longest = options[-1].draft_length if options else 0

    @torch.inference_mode()
    def generate(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        eos_token_id: int | None = None,
    ) -> ReferenceAnswer:
        """Continue a prompt; an encoder-decoder encodes it and starts from its start token.

        Args:
            temperature: 0 takes the argmax; each drafter multiplies it by its temperature scale.
            top_k, top_p: applied to every model's probabilities after the temperature; 0 and 1 do
                nothing.
            seed: of all random numbers of the request.
            eos_token_id: token that ends the request before `max_tokens`; None for none.

        Raises:
            ValueError: names the argument and what it may be.
        """
        for fault, message in (
            (not len(prompt_token_ids), "prompt_token_ids is empty: give at least one token"),
            (max_tokens < 1, f"max_tokens is {max_tokens}, must be at least 1"),
            (temperature < 0, f"temperature is {temperature}, must be 0 or above"),
            (top_k < 0, f"top_k is {top_k}, must be 0 (off) or above"),
            (not 0 < top_p <= 1, f"top_p is {top_p}, must be in (0, 1]"),
        ):
            if fault:
                raise ValueError(f"{message}.")
        if self.cascade is not None:
            self.cascade.forget(0)
        first = list(prompt_token_ids)
        for model in (*self.levels, self.target):
            # Only levels with state per request have it.
            if begin := getattr(model, "begin", None):
                first = begin(list(prompt_token_ids))
        capacity, scales = len(first) + max_tokens + self.longest, [*self.scales, 1.0]
        eos = -1 if eos_token_id is None else eos_token_id
        request = Request(first, capacity, scales, temperature, top_k, top_p, seed, eos)
        self.counts.take()
        result = ReferenceAnswer()
        while len(result.token_ids) < max_tokens and eos_token_id not in result.token_ids[-1:]:
            # The target adds a token of its own to every draft.
            most = min(self.longest, max_tokens - len(result.token_ids) - 1)
            if self.tree_drafter is None:
                drafted, accepted, emitted = self._chain_step(request, most)
            else:
                drafted, accepted, emitted = self._tree_step(request, most, *self.tree_drafter)
            if eos_token_id in emitted:
                emitted = emitted[: emitted.index(eos_token_id) + 1]
            request.commit(emitted)
            result.token_ids += emitted
            result.target_calls += 1
            result.drafted += drafted
            result.accepted += accepted
        result.counts = self.counts.take()
        return result

    def _chain_step(self, request: Request, most: int) -> tuple[int, int, list[int]]:
        """(draft tokens, accepted ones, tokens of one target call)."""
        drafts = DraftStore(1, 0)
        if self.cascade is not None:
            drafts = self.cascade.propose(request.draft_batch(), ONLY, np.array([most]))
        count, model = int(drafts.counts[0]), len(self.levels)
        path = drafts.token_ids[0, :count].tolist()
        logits = request.logits_along(self.target, model, path)
        rows, uniforms = request.probs(logits, model), request.draw(count + 1, model)
        emitted, accepted = drafts.verify(0, rows, uniforms, self.verifier)
        if self.cascade is not None and count:
            self.cascade.record_acceptance(ONLY, np.array([accepted]), request.thresholds)
            # What levels computed of a draft is of no use after another one.
            request.cached[:-1] = np.minimum(request.cached[:-1], request.length + accepted)
        return count, accepted, emitted

    def _tree_step(
        self, request: Request, most: int, drafter: Level, options: TreeOptions
    ) -> tuple[int, int, list[int]]:
        """(nodes, accepted ones, tokens of one target call)."""
        draft = grow(drafter, options, request, most)
        logits = target_logits(self.target, 1, draft, request)
        uniforms = request.draw(len(draft.tree) + 1, 1)
        rows = request.probs(logits, 1)
        emitted, path = verify_tree(
            rows, draft.probs, draft.tree, uniforms, method=options.verifier
        )
        # Columns drafted, accepted, rounds, forwards.
        gained = len(draft.tree), len(path), len(draft.tree) > 0, draft.forwards
        self.counts.rows[0, : Count.forwards + 1] += gained
        return len(draft.tree), len(path), emitted
