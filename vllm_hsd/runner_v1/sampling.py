"""Sampling parameters of a V1 batch, as distributions over the vocabulary.

The stock rejection sampler of vLLM 0.32 truncates the temperature on CPU (vLLM issues 55005 and
55006), so nothing of its expansion is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.bad_words import apply_bad_words_with_drafts
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

from vllm_hsd.runner_v1.thinking_budget import force_end_of_thinking
from vllm_hsd.verify.residual import ROW_SUM_TOLERANCE

# vLLM's own bound between greedy and sampled requests.
GREEDY_BELOW = 1e-5


class RequestSampling:
    """Temperature, min-p, top-k and top-p of the requests of one batch.

    Args:
        metadata: vLLM's sampling metadata; its tensors are indexed by batch row.
        scales: factor on the temperature per level; the target's is 1.
    """

    def __init__(self, metadata: SamplingMetadata, scales: list[float] | None = None) -> None:
        self.metadata = metadata
        self.scales = scales or []
        self.bias: dict[int, dict[int, float]] = {}
        self.min_p: torch.Tensor | None = None
        for processor in metadata.logitsprocs.all:
            if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
                self.min_p = processor.min_p_cpu_tensor
            elif isinstance(processor, LogitBiasLogitsProcessor) and processor.biases:
                self.bias = processor.biases

    @property
    def greedy(self) -> bool:
        """Every request of the batch takes the argmax."""
        return self.metadata.all_greedy

    @property
    def masks(self) -> bool:
        """Some request has allowed tokens or logit bias, which move even the argmax of a level."""
        return self.metadata.allowed_token_ids_mask is not None or bool(self.bias)

    @property
    def needs_rows(self) -> bool:
        """Some request wants what vLLM's plain sampler gives to other rows under speculation.

        It forces the end of thinking in the first row, and answers `logprob_token_ids` to all.
        """
        holder = self.metadata.thinking_budget_state_holder
        thinks = holder is not None and holder.has_tracked_requests()
        return bool(self.metadata.logprob_token_ids) or thinks

    def probabilities(
        self, logits: torch.Tensor, requests: np.ndarray, scale: float = 1.0
    ) -> torch.Tensor:
        """The distribution that a token is drawn from.

        Args:
            logits: [n, V] float32, penalties and masks already applied.
            requests: [n] int64, batch row of the request that each row belongs to.
            scale: factor on the temperature.

        Returns:
            [n, V] float32 rows that sum to 1; one-hot at temperature 0.
        """
        rows = torch.from_numpy(requests).to(logits.device)
        scaled, is_greedy = self.constrained(logits, rows, scale)
        probs = scaled.softmax(-1)
        if is_greedy is not None:
            chosen = is_greedy.nonzero()[:, 0]
            best = logits[chosen].argmax(-1)
            probs[chosen] = 0.0
            probs[chosen, best] = 1.0
        return probs

    def target_probabilities(
        self, logits: torch.Tensor, requests: np.ndarray
    ) -> tuple[torch.Tensor, np.ndarray]:
        """As `probabilities`, for the target, whose rows may hold anything a request asks for.

        vLLM's sampler on a CPU takes the argmax of noisy logits and passes over NaN, so a row with
        NaN or +inf still has a distribution there: it is returned. Elsewhere softmax makes all of
        such a row NaN, which is left to `verify_batch`.

        Returns:
            ([n, V] float32 rows; [n] bool on the host, which of them sum to 1).
        """
        probs = self.probabilities(logits, requests)
        normalized = (probs.sum(-1) - 1).abs() < ROW_SUM_TOLERANCE
        if probs.device.type == "cpu" and not normalized.all():
            odd = (~normalized).nonzero()[:, 0]
            rows = torch.from_numpy(requests)[odd]
            constrained, _ = self.constrained(logits[odd], rows)
            probs[odd] = _argmax_sampled(constrained)
            normalized[odd] = True
        return probs, normalized.cpu().numpy()

    def constrained(
        self, logits: torch.Tensor, rows: torch.Tensor, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits after temperature, min-p, top-k and top-p, and which rows are greedy (or None)."""
        if self.greedy:
            return logits, torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        scaled, is_greedy = self._scaled(logits, rows, scale)
        return apply_top_k_top_p(scaled, *self._top_k_top_p(rows)), is_greedy

    def coupled_tokens(
        self,
        logits: torch.Tensor,
        requests: np.ndarray,
        noise: Sequence[torch.Generator | None],
        sampler: TopKTopPSampler,
        scale: float = 1.0,
    ) -> np.ndarray:
        """Tokens as vLLM's sampler draws them; the argmax for greedy requests.

        Args:
            logits: [n, V] float32, penalties and masks already applied.
            requests: [n] int64, batch row of the request that each row belongs to.
            noise: [n] generators, which move as vLLM's do; None for greedy requests.
            sampler: vLLM's, of the target.
            scale: factor on the temperature.

        Returns:
            [n] int64.
        """
        if self.greedy:
            # vLLM keeps no temperatures then.
            return logits.argmax(-1).cpu().numpy()
        rows = torch.from_numpy(requests).to(logits.device)
        scaled, is_greedy = self._scaled(logits, rows, scale)
        generators = {i: generator for i, generator in enumerate(noise) if generator is not None}
        tokens, _ = sampler(scaled, generators, *self._top_k_top_p(rows))
        if is_greedy is not None and is_greedy.any():
            tokens = torch.where(is_greedy, logits.argmax(-1), tokens)
        return tokens.cpu().numpy().astype(np.int64)

    def _top_k_top_p(self, rows: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        top_k, top_p = self.metadata.top_k, self.metadata.top_p
        return None if top_k is None else top_k[rows], None if top_p is None else top_p[rows]

    def _scaled(
        self, logits: torch.Tensor, rows: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """New logits after temperature and min-p, and which rows are greedy (or None)."""
        metadata = self.metadata
        assert metadata.temperature is not None
        temperature = metadata.temperature[rows] * scale
        is_greedy = None
        if not metadata.all_random:
            is_greedy = temperature < GREEDY_BELOW
            temperature = torch.where(is_greedy, torch.ones_like(temperature), temperature)
        scaled = logits / temperature[:, None]
        if self.min_p is not None:
            bound = self.min_p.to(rows.device)[rows].log()[:, None] + scaled.amax(-1, keepdim=True)
            scaled.masked_fill_(scaled < bound, -float("inf"))
        return scaled, is_greedy

    def draft_probabilities(
        self, logits: torch.Tensor, requests: np.ndarray, level: int
    ) -> torch.Tensor:
        """Probabilities of a level: as the target's, without what depends on earlier output.

        Allowed tokens and logit bias are applied, penalties, bad words and min_tokens are not.
        """
        return self.probabilities(self.masked(logits, requests), requests, self.scales[level])

    def masked(self, logits: torch.Tensor, requests: np.ndarray) -> torch.Tensor:
        """[n, V] float32 logits with allowed tokens and logit bias applied."""
        logits = logits.to(torch.float32)
        allowed = self.metadata.allowed_token_ids_mask
        if allowed is not None:
            rows = torch.from_numpy(requests).to(allowed.device)
            logits = logits.masked_fill(allowed[rows], -float("inf"))
        if self.bias:
            logits = self._biased(logits, requests)
        return logits

    def _biased(self, logits: torch.Tensor, requests: np.ndarray) -> torch.Tensor:
        logits = logits.clone()
        for request, bias in self.bias.items():
            rows = torch.from_numpy(np.flatnonzero(requests == request)).to(logits.device)
            tokens = torch.tensor(list(bias), device=logits.device)
            values = torch.tensor(list(bias.values()), device=logits.device)
            logits[rows[:, None], tokens] += values
        return logits

    def target_logits(
        self,
        logits: torch.Tensor,
        counts: np.ndarray,
        drafts: np.ndarray,
        before: Callable[[int], list[list[int]]] | None = None,
    ) -> torch.Tensor:
        """Apply everything that may change the argmax, in the order of vLLM's plain sampler.

        Args:
            logits: [sum(counts + 1), V], request after request; not changed.
            counts: [batch] int64 draft lengths.
            drafts: [batch, max(counts)] int64 draft token ids, -1 where there is none.
            before: request -> for each of its rows the places, counted from 1, of the draft tokens
                that precede it; None for chains. Requests with min_tokens ahead or a thinking
                budget have a chain.

        Returns:
            [sum(counts + 1), V] float32.
        """
        metadata = self.metadata
        requests = np.repeat(np.arange(len(counts)), counts + 1)
        masked = self.masked(logits, requests)
        bad_words = metadata.bad_words_token_ids
        min_tokens = [
            processor
            for processor in metadata.logitsprocs.non_argmax_invariant
            if isinstance(processor, MinTokensLogitsProcessor) and processor.min_toks
        ]
        holder = metadata.thinking_budget_state_holder
        thinking = holder is not None and holder.has_tracked_requests()
        if not (bad_words or min_tokens or thinking) and metadata.no_penalties:
            return masked
        masked = masked.clone() if masked.data_ptr() == logits.data_ptr() else masked
        num_tokens = (counts + 1).tolist()
        past = _outputs_per_row(metadata.output_token_ids, counts, drafts, before)
        if bad_words:
            apply_bad_words_with_drafts(masked, bad_words, past, num_tokens)
        for processor in min_tokens:
            masked = processor.apply_with_spec_decode(masked, num_tokens)
        if not metadata.no_penalties:
            rows = torch.from_numpy(requests).to(masked.device)
            assert metadata.prompt_token_ids is not None
            masked = apply_all_penalties(
                masked,
                metadata.prompt_token_ids[rows],
                metadata.presence_penalties[rows],
                metadata.frequency_penalties[rows],
                metadata.repetition_penalties[rows],
                past,
            )
        if holder is not None:
            force_end_of_thinking(holder, masked, metadata.output_token_ids, counts, drafts)
        return masked


def rows_at(logits: torch.Tensor, places: np.ndarray) -> torch.Tensor:
    """[n, V] rows at [n] int64 places; a single one is not copied, a fifth of a draw."""
    if len(places) == 1:
        return logits[int(places[0]) :][:1]
    return logits.index_select(0, torch.from_numpy(places).to(logits.device))


def _argmax_sampled(logits: torch.Tensor) -> torch.Tensor:
    """Distribution of a running argmax over logits + noise, as vLLM's CPU sampler computes it.

    NaN never compares as larger, so it is passed over, except for the first token: nothing compares
    as larger than a NaN there. The first +inf wins.

    Args:
        logits: [n, V] with any values.

    Returns:
        [n, V] rows that sum to 1; the first token where all logits are -inf.
    """
    known = logits.masked_fill(logits.isnan(), -float("inf"))
    known[logits[:, 0].isnan(), 0] = float("inf")
    highest, first = known.max(-1)
    certain = torch.nn.functional.one_hot(first, known.shape[1]).to(known.dtype)
    return torch.where(highest.isinf()[:, None], certain, known.softmax(-1))


def _outputs_per_row(
    outputs: list[list[int]],
    counts: np.ndarray,
    drafts: np.ndarray,
    before: Callable[[int], list[list[int]]] | None,
) -> list[list[int]]:
    """Output tokens that precede every row, and the tokens of the request's draft that do."""
    found = []
    for request, (output, count) in enumerate(zip(outputs, counts.tolist(), strict=False)):
        draft = drafts[request].clip(0).tolist()
        chain = (range(1, n + 1) for n in range(count + 1))
        for places in chain if before is None else before(request):
            found.append([*output, *(draft[place - 1] for place in places)])
    return found
