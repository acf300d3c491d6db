"""Speculative decoding with Hugging Face models, one request at a time: slow, short, exact.

Serving does not use this engine. It is the reference for the vLLM path, and it hosts what vLLM's
runners cannot: models below encoder-decoders. It runs `tools.reference.cascade` and
`vllm_hsd.rules` with probabilities in float64: single drafts and cascades of any depth, with
entropy-based early stopping, several rounds and horizontal tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_hsd.cascade.counters import LevelCounts
from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.rules.chain import verify_batch, verify_greedy
from vllm_hsd.rules.residual import is_normalized
from vllm_hsd.tools.lookup_level import LookupLevel
from vllm_hsd.tools.reference.batch import Level
from vllm_hsd.tools.reference.cascade import Cascade
from vllm_hsd.tools.reference.drafts import DraftStore
from vllm_hsd.tools.reference.request import ONLY, Request


@dataclass
class ReferenceAnswer:
    """The tokens of one request and counts of how they were generated.

    Attributes:
        token_ids: the continuation, eos included.
        target_calls: verifications by the target.
        drafted, accepted: draft tokens that the target verified, and that it accepted.
        counts: per level, cheapest first.
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
    """A target with a cascade below it.

    Args:
        target: the model whose distribution is kept, e.g. a `HuggingFaceLevel`.
        levels: drafters, cheapest first; none for plain decoding.
        options: one per level; the draft length of the last one is that of the target's drafts.
        verifier: "block" or "standard", how the target verifies a cascade's draft.
        horizontal_tokens: see `Cascade`.

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
    ) -> None:
        if len(levels) != len(options):
            raise ValueError(f"options has {len(options)} entries for {len(levels)} levels.")
        for i, level in enumerate(levels):
            theirs = getattr(level, "encoder_decoder", None)
            if theirs is not None and theirs != getattr(target, "encoder_decoder", None):
                raise ValueError(
                    f"levels[{i}] and the target must both be encoder-decoders or both decoders."
                )
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
        """
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
            drafted, accepted, emitted = self._step(request, most)
            if eos_token_id in emitted:
                emitted = emitted[: emitted.index(eos_token_id) + 1]
            request.commit(emitted)
            result.token_ids += emitted
            result.target_calls += 1
            result.drafted += drafted
            result.accepted += accepted
        result.counts = self.counts.take()
        return result

    def _step(self, request: Request, most: int) -> tuple[int, int, list[int]]:
        """(draft tokens, accepted ones, tokens of one target call)."""
        drafts = DraftStore(1, 0)
        if self.cascade is not None:
            drafts = self.cascade.propose(request.draft_batch(), ONLY, np.array([most]))
        counts = drafts.counts[ONLY]
        count = int(counts[0])
        path = drafts.token_ids[0, :count]
        model = len(self.levels)
        logits = request.target_logits(self.target, path)
        probs = logits if request.greedy else request.probs(logits, model)
        chain = drafts.chain_batch(ONLY, probs)
        if request.greedy:
            token_ids, accepted = verify_greedy(chain, logits.argmax(-1).cpu().numpy())
        else:
            uniforms = request.uniforms(ONLY, counts + 1, model)
            target_ok = is_normalized(chain.target_probs)
            token_ids, accepted = verify_batch(chain, self.verifier, uniforms, target_ok=target_ok)
        if self.cascade is not None and count:
            self.cascade.record_acceptance(ONLY, accepted, request.thresholds)
            # What levels computed of a draft is of no use after another one.
            request.cached[:-1] = np.minimum(request.cached[:-1], request.length + accepted)
        emitted = [token for token in token_ids[0].tolist() if token >= 0]
        return count, int(accepted[0]), emitted
