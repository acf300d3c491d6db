"""The target's sampler: lossless verification in place of vLLM's V1 rejection sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_hsd.core.drafts import ragged_arange
from vllm_hsd.runner_v1.sampling import RequestSampling
from vllm_hsd.verify import verify_chain

if TYPE_CHECKING:
    from vllm_hsd.runner_v1.proposer import CascadeProposer


class VerifyingSampler(RejectionSampler):
    """vLLM's sampler for its log-probabilities and its place in the runner, with the rest ours."""

    def __init__(self, sampler: Sampler) -> None:
        torch.nn.Module.__init__(self)
        self.sampler = sampler
        mode = sampler.logprobs_mode
        self.is_processed_logprobs_mode = mode in PROCESSED_LOGPROBS_MODES
        self.is_logits_logprobs_mode = mode in ("raw_logits", "processed_logits")

    def _logprobs(self, metadata, logits, processed, sampled, laws, owners):
        wanted = laws.metadata.max_num_logprobs
        if wanted is None:
            return None
        rows = logits.to(torch.float32)
        if self.is_processed_logprobs_mode:
            index = torch.from_numpy(owners).to(processed.device)
            constrained, is_greedy = laws.constrained(processed, index)
            rows = constrained
            if is_greedy is not None:
                rows = torch.where(is_greedy[:, None], processed, constrained)
        return self._get_logprobs_tensors(
            wanted,
            metadata,
            logits,
            rows[metadata.target_logits_indices],
            rows[metadata.bonus_logits_indices],
            sampled,
        )


class HsdSampler(VerifyingSampler):
    """Verifies the cascade's drafts by the target's rows."""

    def __init__(self, proposer: CascadeProposer) -> None:
        super().__init__(proposer.runner.sampler)
        self.proposer = proposer
        self.method = proposer.speculative_config.hsd.verifier

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Sample every request's next tokens.

        Args:
            metadata: draft tokens of the batch as the scheduler passed them on.
            draft_probs: unused, the proposal rows are kept with the drafts.
            logits: [sum(n_i + 1), V] the target's logits, request after request.
            sampling_metadata: sampling parameters of the batch.

        Returns:
            sampled_token_ids [batch, max(n_i) + 1] int32, padded with -1.
        """
        counts = np.array(metadata.num_draft_tokens, dtype=np.int64)
        scheduled = np.split(metadata.draft_token_ids.cpu().numpy(), np.cumsum(counts)[:-1])
        laws = RequestSampling(sampling_metadata)
        drafts = [ids.clip(0).tolist() for ids in scheduled]
        processed = laws.target_logits(logits, (counts + 1).tolist(), drafts)
        owners = np.repeat(np.arange(len(counts)), counts + 1)
        slots = self._slots(len(counts))
        checked = _Drafts(self.proposer.requests.pending, slots, scheduled)
        if laws.greedy:
            rows, proposals, method, uniforms = processed, None, "greedy", None
        else:
            rows = laws.probabilities(processed, owners)
            proposals, method = checked.laws(), self.method
            uniforms = self._coins(slots, checked.counts + 1)
        result = verify_chain(
            checked.target_rows(rows, counts),
            proposals,
            torch.from_numpy(checked.token_ids).to(logits.device),
            checked.counts.tolist(),
            method=method,
            uniforms=uniforms,
        )
        self._note_verdict(checked, slots, result.num_accepted.cpu().numpy())
        width = int(counts.max(initial=0)) + 1
        sampled = torch.full((len(counts), width), -1, dtype=torch.int32, device=logits.device)
        drawn = result.token_ids[:, :width]
        sampled[:, : drawn.shape[1]] = drawn
        # A cut token that was accepted ends the step: there is no row for a token behind it.
        cut = checked.counts > checked.scored
        full = torch.from_numpy(np.where(cut, checked.counts, width)).to(logits.device)
        sampled[torch.arange(width, device=logits.device) >= full[:, None]] = -1
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=self._logprobs(metadata, logits, processed, sampled, laws, owners),
        )

    def _note_verdict(
        self, drafts: _Drafts, slots: np.ndarray | None, accepted: np.ndarray
    ) -> None:
        """Tell the cascade what became of its drafts, which may come from several steps."""
        by_proposal: dict[int, list[int]] = {}
        for row, draft in enumerate(drafts.pending):
            if draft is not None:
                by_proposal.setdefault(id(draft.proposal), []).append(row)
        for rows in by_proposal.values():
            pending = [drafts.pending[row] for row in rows]
            self.proposer.cascade.record_acceptance(
                pending[0].proposal,
                np.array([draft.row for draft in pending]),
                accepted[rows],
                self.proposer.requests.thresholds,
                slots[rows],
            )

    def _slots(self, batch: int) -> np.ndarray | None:
        """Slots of the batch's requests; None in vLLM's warm-up, whose batch has no requests."""
        input_batch = self.proposer.runner.input_batch
        if input_batch.num_reqs != batch:
            return None
        # Our coins are counted per request: vLLM need not rewind its generators, which torch
        # cannot do on CPU when a prompt chunk's sample is thrown away.
        input_batch.generators.clear()
        return self.proposer.request_slots(batch)

    def _coins(self, slots: np.ndarray | None, counts: np.ndarray) -> torch.Tensor:
        if slots is None:
            return torch.rand(int(counts.sum()), dtype=torch.float64)
        requests = self.proposer.requests
        target = len(self.proposer.cascade.levels)
        coins = requests.coins(slots, counts, stream=target)
        # A prompt chunk's sample is thrown away: it must not move a seeded request's counter.
        discarded = self.proposer.runner.discard_request_mask.np[: len(slots)]
        requests.draws[target, slots] -= np.where(discarded, counts, 0)
        return coins


class _Drafts:
    """The part of every scheduled draft that the cascade really drew, with its laws.

    The scheduler may cut a draft, or schedule placeholders where there is none. Behind the last
    token that was both drawn and scheduled, the first one that was only drawn is scored too, with
    its own row at the bonus position: a grammar cuts because of the token it refuses, and a plain
    bonus there would not be the target's law (DESIGN, what silently loses losslessness, 5).

    Attributes:
        token_ids: [sum(counts)] int64, request after request.
        counts: [batch] int64, tokens to verify; `scored[i] + 1` where a cut token is scored.
        scored: [batch] int64, leading tokens behind which the target has computed a row.
    """

    def __init__(self, pending: list, slots: np.ndarray | None, scheduled: list[np.ndarray]):
        batch = len(scheduled)
        self.pending = [None] * batch if slots is None else [pending[slot] for slot in slots]
        self.counts = np.zeros(batch, dtype=np.int64)
        self.scored = np.zeros(batch, dtype=np.int64)
        parts = []
        for row, (draft, ids) in enumerate(zip(self.pending, scheduled, strict=True)):
            if draft is None:
                continue
            ours = draft.token_ids
            common = min(len(ids), len(ours))
            equal = np.logical_and.accumulate(ids[:common] == ours[:common])
            self.scored[row] = equal.sum()
            self.counts[row] = min(self.scored[row] + 1, len(ours))
            parts.append(ours[: self.counts[row]])
        self.token_ids = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def laws(self) -> torch.Tensor | None:
        """[sum(counts), V] proposal rows; None when all of them are one-hot."""
        drafts = [
            (draft.proposal.laws, draft.sources[:count], draft.token_ids[:count])
            for draft, count in zip(self.pending, self.counts, strict=True)
            if count
        ]
        if all(laws is None for laws, _, _ in drafts):
            return None
        first = drafts[0][0]
        if all(laws is first for laws, _, _ in drafts):
            index = np.concatenate([sources for _, sources, _ in drafts])
            return first.index_select(0, torch.from_numpy(index).to(first.device))
        width = next(laws.shape[1] for laws, _, _ in drafts if laws is not None)
        return torch.cat(
            [
                torch.nn.functional.one_hot(torch.from_numpy(token_ids), width).float()
                if laws is None
                else laws[torch.from_numpy(sources).to(laws.device)]
                for laws, sources, token_ids in drafts
            ]
        )

    def target_rows(self, rows: torch.Tensor, scheduled: np.ndarray) -> torch.Tensor:
        """[sum(counts + 1), V] the rows that verify the drafts.

        Behind a scored cut token the bonus row stands in for the missing one; what is drawn from
        it is dropped.
        """
        if (self.counts == scheduled).all() and (self.scored == scheduled).all():
            return rows
        owners, offsets = ragged_arange(self.counts + 1)
        starts = np.cumsum(scheduled + 1) - (scheduled + 1)
        index = starts[owners] + np.minimum(offsets, self.scored[owners])
        return rows.index_select(0, torch.from_numpy(index).to(rows.device))
