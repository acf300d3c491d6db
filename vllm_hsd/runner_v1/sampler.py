"""The target's sampler: lossless verification in place of vLLM's V1 rejection sampler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_hsd.config import CascadeConfig
from vllm_hsd.core.cascade import Cascade
from vllm_hsd.core.drafts import DraftStore, ragged_starts
from vllm_hsd.core.row_layout import Rows
from vllm_hsd.runner_v1.noise import generators
from vllm_hsd.runner_v1.request_state import RequestState
from vllm_hsd.runner_v1.sampling import GREEDY_BELOW, RequestSampling, rows_at
from vllm_hsd.verify.chain import argmax_rows, verify_batch, verify_greedy
from vllm_hsd.verify.coupled import verify_coupled
from vllm_hsd.verify.inputs import ChainBatch


class DraftingState(Protocol):
    """What a sampler shares with the proposer whose drafts it verifies."""

    runner: Any
    cascade: Cascade
    cascade_config: CascadeConfig
    requests: RequestState

    def request_slots(self, count: int) -> np.ndarray:
        """[count] slots in `requests` of the first `count` requests of the batch."""


class TargetStep(NamedTuple):
    """What the target computed for the chains of a batch.

    Attributes:
        counts: [batch] int64, draft lengths as scheduled.
        scheduled: [batch, max(counts)] int64 draft tokens, padded with -1.
        draft_probs: [sum(counts), V] proposal probabilities of a stock drafter, or None.
        sampling: the batch's sampling parameters.
        processed: [sum(counts + 1), V] float32 logits with penalties and masks applied.
        owners: [sum(counts + 1)] int64, the request of each row.
        slots: [batch] int64, see `DraftingState.requests`; None without a cascade and in vLLM's
            warm-up.
        noise: [batch] `RequestNoise` of coupled requests, None for the others.
    """

    counts: np.ndarray
    scheduled: np.ndarray
    draft_probs: torch.Tensor | None
    sampling: RequestSampling
    processed: torch.Tensor
    owners: np.ndarray
    slots: np.ndarray | None
    noise: np.ndarray

    def rows_of(self, requests: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        """`processed` and `owners` of some requests, [k] int64 in order."""
        if len(requests) == len(self.counts):
            return self.processed, self.owners
        rows = np.flatnonzero(np.isin(self.owners, requests))
        return self.processed[torch.from_numpy(rows).to(self.processed.device)], self.owners[rows]


class VerifyingSampler(RejectionSampler):
    """Base of our samplers: vLLM's class for log-probabilities and its place in the runner.

    Attributes:
        runner: vLLM's, which hosts the target; None outside an engine.
    """

    runner: Any = None

    def __init__(self, sampler: Sampler) -> None:
        torch.nn.Module.__init__(self)
        self.sampler = sampler
        mode = sampler.logprobs_mode
        self.is_processed_logprobs_mode = mode in PROCESSED_LOGPROBS_MODES
        self.is_logits_logprobs_mode = mode in ("raw_logits", "processed_logits")

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Sample every request's next tokens.

        Args:
            metadata: draft tokens of the batch as the scheduler passed them on, -1 for none.
            draft_probs: [sum(n_i), V] proposal probabilities of a stock drafter, or None; a
                cascade keeps them with its drafts.
            logits: [sum(n_i + 1), V] the target's logits, request after request.
            sampling_metadata: sampling parameters of the batch.

        Returns:
            sampled_token_ids [batch, max(n_i) + 1] int32, padded with -1.
        """
        counts = np.array(metadata.num_draft_tokens, dtype=np.int64)
        scheduled = padded(metadata.draft_token_ids.cpu().numpy(), counts)
        sampling = RequestSampling(sampling_metadata)
        owners = np.repeat(np.arange(len(counts)), counts + 1)
        slots, noise, rows = None, np.full(len(counts), None), None
        # vLLM's warm-up has no requests.
        if self.runner is not None and self.runner.input_batch.num_reqs == len(counts):
            slots, noise = self._requests(len(counts))
            rows = self._rows(counts)
            # No generator moves for a sample that is thrown away, so vLLM must not rewind any:
            # torch cannot do that on a CPU.
            self.runner.input_batch.generators.clear()
            alone = rows is None and not counts.any() and self._nothing_drafted(slots)
            if alone and not sampling.needs_rows:
                return self._sample_alone(logits, sampling_metadata, noise)
        before = None if rows is None else rows.before
        processed = sampling.target_logits(logits, counts, scheduled, before)
        step = TargetStep(counts, scheduled, draft_probs, sampling, processed, owners, slots, noise)
        emitted, places = self._verify(step, rows)
        for own, count in zip(noise, (emitted >= 0).sum(1).tolist(), strict=True):
            if own is not None and count:
                own.emitted(count)
        sampled = torch.from_numpy(emitted).to(logits.device)
        logprobs = self._logprobs(
            logits,
            processed,
            sampled,
            sampling,
            owners,
            ragged_starts(counts + 1)[:, None] + places,
        )
        return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=logprobs)

    def _verify(self, step: TargetStep, rows: Rows | None) -> tuple[np.ndarray, np.ndarray]:
        """Verify the batch's drafts.

        Args:
            step: the batch, with its branches.
            rows: as `_rows` gave them.

        Returns:
            (token ids [batch, width] int32, padded with -1; [batch or 1, width] int64, the place of
            each token's row among its request's logits).
        """
        emitted, accepted = self._verify_chains(step, np.ones(len(step.counts), dtype=bool))
        self._verified(step, accepted)
        return emitted, np.arange(emitted.shape[1])[None]

    def _verify_chains(
        self, step: TargetStep, requests: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Verify the chains of [batch] bool `requests`.

        Returns:
            (token ids [batch, longest draft + 1] int32, padded with -1; [batch] int64 accepted
            draft tokens).
        """
        batch = len(step.counts)
        emitted = np.full((batch, step.scheduled.shape[1] + 1), -1, dtype=np.int32)
        accepted, chosen = np.zeros(batch, dtype=np.int64), self._chosen(step)
        for some, verify in (
            (requests & ~chosen, self._verify_drawn),
            (requests & chosen, self._verify_chosen),
        ):
            if some.any():
                tokens, accepted[some] = verify(step, np.flatnonzero(some))
                emitted[some, : tokens.shape[1]] = tokens
        return emitted, accepted

    def _sample_alone(
        self, logits: torch.Tensor, metadata: SamplingMetadata, noise: np.ndarray
    ) -> SamplerOutput:
        """vLLM's own sampling, of a step without drafts."""
        kept = ~self.runner.discard_request_mask.np[: len(noise)]
        # A prompt chunk's sample is thrown away: it takes no noise.
        coupled = np.flatnonzero(noise.astype(bool))
        found = {i: noise[i].generator if kept[i] else noise[i].at(0) for i in coupled.tolist()}
        output: SamplerOutput = self.sampler(logits, replace(metadata, generators=found))
        for own in noise[coupled[kept[coupled]]]:
            own.moved()
        return output

    def _nothing_drafted(self, slots: np.ndarray | None) -> bool:
        """Whether no draft was drawn for the requests in [batch] slots.

        One that was drawn and not scheduled still has to be verified: a grammar may have refused
        it for its tokens.
        """
        return False

    def _requests(self, batch: int) -> tuple[np.ndarray | None, np.ndarray]:
        """`TargetStep.slots` and `TargetStep.noise` of the runner's batch."""
        raise NotImplementedError

    def _verify_drawn(
        self, step: TargetStep, requests: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Verify drafts by proposal probabilities, or greedily where all requests are greedy.

        Returns:
            (token ids [k, <= width] padded with -1, accepted [k]) of requests [k].
        """
        raise NotImplementedError

    def _verified(self, step: TargetStep, accepted: np.ndarray) -> None:
        """Take in how many tokens of each draft, [batch] int64, were accepted."""

    def _rows(self, counts: np.ndarray) -> Rows | None:
        """The rows of the target's logits, of [batch] int64 draft lengths; None for chains only."""
        return None

    def _chosen(self, step: TargetStep) -> np.ndarray:
        """[batch] bool, requests whose tokens follow from the logits and the position alone."""
        coupled = step.noise.astype(bool)
        if step.sampling.greedy or not coupled.any():
            return np.zeros(len(coupled), dtype=bool)
        return coupled | (self.runner.input_batch.temperature_cpu[: len(coupled)] < GREEDY_BELOW)

    def _verify_chosen(
        self, step: TargetStep, requests: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Accept while the draft is what vLLM draws from the target's row without speculation."""
        # A prompt chunk's sample is thrown away: it takes no noise.
        kept = ~self.runner.discard_request_mask.np[requests]
        now, noise = requests[kept], step.noise[requests[kept]]
        first = ragged_starts(step.counts + 1)[now]

        def choose(some: np.ndarray, t: int) -> np.ndarray:
            return step.sampling.coupled_tokens(
                rows_at(step.processed, first[some] + t),
                now[some],
                generators(noise[some], [t] * len(some)),
                self.sampler.topk_topp_sampler,
            )

        token_ids = np.full((len(requests), step.scheduled.shape[1] + 1), -1, dtype=np.int64)
        accepted = np.zeros(len(requests), dtype=np.int64)
        found = verify_coupled(step.scheduled[now], step.counts[now], choose)
        token_ids[kept], accepted[kept] = found
        return token_ids, accepted

    def _logprobs(
        self,
        logits: torch.Tensor,
        processed: torch.Tensor,
        sampled: torch.Tensor,
        sampling: RequestSampling,
        owners: np.ndarray,
        places: np.ndarray,
    ) -> LogprobsTensors | None:
        """vLLM's log-probabilities of [batch, width] `sampled`, from these places of the logits.

        The sampled token's come first; then those of the most likely tokens, or of the tokens that
        the request lists in `logprob_token_ids`. None where no request wants any.
        """
        wanted = sampling.metadata.max_num_logprobs
        listed = sampling.metadata.logprob_token_ids or {}
        if wanted is None and not listed:
            return None
        rows = logits.to(torch.float32)
        if self.is_processed_logprobs_mode:
            index = torch.from_numpy(owners).to(processed.device)
            constrained, is_greedy = sampling.constrained(processed, index)
            rows = constrained
            if is_greedy is not None:
                rows = torch.where(is_greedy[:, None], processed, constrained)
        width = sampled.shape[1]
        # Places after the last token are not read.
        index = torch.from_numpy(np.minimum(places, len(rows) - 1).ravel())
        rows = rows.index_select(0, index.to(rows.device))
        logprobs = rows if self.is_logits_logprobs_mode else self.sampler.compute_logprobs(rows)
        count = max(wanted or 0, *map(len, listed.values()), 0)
        found = self.sampler.gather_logprobs(logprobs, count, sampled.clamp_min(0).flatten().long())
        for request, token_ids in listed.items():
            own = slice(request * width, (request + 1) * width)
            columns = torch.tensor(token_ids, device=rows.device)
            found.logprob_token_ids[own, 1 : len(columns) + 1] = columns.to(torch.int32)
            found.logprobs[own, 1 : len(columns) + 1] = logprobs[own, columns]
        return found


class CascadeSampler(VerifyingSampler):
    """Verifies the cascade's drafts by the target's probabilities."""

    def __init__(self, state: DraftingState) -> None:
        super().__init__(state.runner.sampler)
        self.state, self.runner = state, state.runner
        self.verifier = state.cascade_config.drawn_verifier

    def _requests(self, batch: int) -> tuple[np.ndarray | None, np.ndarray]:
        slots = self.state.request_slots(batch)
        return slots, self.state.requests.noise[slots]

    def _nothing_drafted(self, slots: np.ndarray | None) -> bool:
        return slots is not None and not self.state.cascade.drafts[-1].counts[slots].any()

    def _verified(self, step: TargetStep, accepted: np.ndarray) -> None:
        if step.slots is not None:
            # The scheduler may have kept a draft that gave up its place here.
            known = np.minimum(accepted, self.state.cascade.drafts[-1].counts[step.slots])
            self.state.cascade.record_acceptance(step.slots, known, self.state.requests.thresholds)

    def _verify_drawn(
        self, step: TargetStep, requests: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        counts, scheduled, sampling = step.counts[requests], step.scheduled[requests], step.sampling
        (probs, owners), target_ok = step.rows_of(requests), None
        if not sampling.greedy:
            probs, target_ok = sampling.target_probabilities(probs, owners)
        slots = None if step.slots is None else step.slots[requests]
        if slots is None:
            # vLLM's warm-up: there are no drafts, and nothing is to be remembered.
            batch, scored = ChainBatch.flat(probs, None, scheduled[:0, 0], 0 * counts), 0 * counts
        else:
            batch, scored = drafts_to_verify(
                self.state.cascade.drafts[-1], slots, scheduled, counts, probs
            )
        if sampling.greedy:
            token_ids, accepted = verify_greedy(batch, argmax_rows(probs)[0])
        else:
            uniforms = self._uniforms(slots, batch.lengths + 1, requests)
            token_ids, accepted = verify_batch(batch, self.verifier, uniforms, target_ok=target_ok)
        emitted = token_ids[:, : step.scheduled.shape[1] + 1]
        width = emitted.shape[1]
        # No target probabilities exist for the token after an accepted draft token that was cut.
        end = np.where(batch.lengths > scored, batch.lengths, width)
        emitted[np.arange(width) >= end[:, None]] = -1
        return emitted, accepted

    def _uniforms(
        self, slots: np.ndarray | None, counts: np.ndarray, requests: np.ndarray
    ) -> np.ndarray:
        if slots is None:
            return np.random.default_rng(0).random(int(counts.sum()))
        kept, target = self.state.requests, len(self.state.cascade.levels)
        uniforms = kept.uniforms(slots, counts, stream=target)
        # A prompt chunk's sample is thrown away: it must not move its request's counter.
        discarded = self.runner.discard_request_mask.np[requests]
        kept.draws[target, slots] -= np.where(discarded, counts, 0)
        return uniforms


def padded(token_ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[sum(counts)] flat tokens as [batch, max(counts)] int64, padded with -1."""
    width = int(counts.max(initial=0))
    rows = np.full((len(counts), width), -1, dtype=np.int64)
    rows[np.arange(width) < counts[:, None]] = token_ids
    return rows


def drafts_to_verify(
    drafts: DraftStore,
    slots: np.ndarray,
    scheduled: np.ndarray,
    counts: np.ndarray,
    probs: torch.Tensor,
) -> tuple[ChainBatch, np.ndarray]:
    """The part of every scheduled draft that the cascade really drew.

    The scheduler may cut a draft, or schedule placeholders where there is none. After the last
    token that was both drawn and scheduled, the first one that was only drawn is verified too, with
    the bonus row as its target: a grammar cuts because of the token it refuses, and drawing a plain
    bonus token there would not be lossless.

    Args:
        drafts: the store that holds them.
        slots: [batch] int64.
        scheduled: [batch, width] int64 scheduled draft tokens, padded with -1.
        counts: [batch] int64, scheduled draft lengths.
        probs: [sum(counts + 1), V] target probabilities (or logits, when all requests are greedy).

    Returns:
        (the batch to verify; [batch] int64 leading tokens after which the target computed a row:
        one less than the batch's length where a cut token is verified).
    """
    drawn = drafts.counts[slots]
    common = min(scheduled.shape[1], drafts.length)
    same = scheduled[:, :common] == drafts.token_ids[slots, :common]
    same &= np.arange(common) < np.minimum(counts, drawn)[:, None]
    scored = np.logical_and.accumulate(same, axis=1).sum(1)
    lengths = np.minimum(scored + 1, drawn)
    return drafts.chain_batch(slots, lengths, probs, counts, scored), scored
