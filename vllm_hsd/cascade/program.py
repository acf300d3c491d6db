"""One proposal: the ops of a schedule, the same code eagerly and in a CUDA graph.

The counterpart of `tools.reference.cascade` for devices. Nothing is read on the host, no shape and
no branch depends on data. tests/host/test_program.py compares the two token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

import torch

from vllm_hsd.cascade import cascade_steps
from vllm_hsd.cascade.adaptive_verification import DraftConfidence
from vllm_hsd.cascade.entropy_stopping import (
    DeviceThresholds,
    end_unsure_drafts,
    pass_entropies_on,
)
from vllm_hsd.cascade.level import Level
from vllm_hsd.cascade.proposal_state import KVGroups, ProposalState
from vllm_hsd.cascade.schedule import Choose, Draft, Lookup, Schedule, Verify
from vllm_hsd.kernels.chain_verify import verify_chain_padded
from vllm_hsd.kernels.filter_rows import row_thresholds
from vllm_hsd.kernels.sample_row import sample_row


class ProgramLevel(Protocol):
    """A level that runs forward passes.

    Attributes:
        in_target_cache: it reads and writes the target's own KV cache (early exits).
    """

    in_target_cache: bool

    def forward(self, state: ProposalState, op: Draft | Verify, num_logits: int) -> torch.Tensor:
        """Feed op.query_length tokens of each of the B requests in `state`.

        Inputs are the first B * op.query_length entries of `input_ids`, `positions` and (per KV-
        cache group) `slot_mapping`, and `seq_lens` and `query_start_loc`.

        Returns:
            [B * num_logits, V] logits of the last num_logits tokens of every request, in the dtype
            of `state.rows[op.level]`, contiguous rows. Rows of padding may hold anything.
        """


# Appends at most `state.requested[0]` tokens to every text: see `lookups`.
ProgramLookup = Callable[[ProposalState], None]


class ProgramSources(NamedTuple):
    """Lookups next to the model of level 0, see `sources.SourcesLookup`.

    Attributes:
        offer: lets the lookups search; no text changes.
        choose: keeps what the model has drafted, or puts an offer in its place.
        drawn: float32 [slots + 1], 1 where a slot's draft is the model's, 0 where a lookup's.
        prefers_drafter, drafter_selected: see `sources.SourcesLookup`; called on a CPU alone.
    """

    offer: ProgramLookup
    choose: ProgramLookup
    drawn: torch.Tensor
    prefers_drafter: Callable[[ProposalState], torch.Tensor]
    drafter_selected: Callable[[], bool]


class Program:
    """A schedule with the levels that it runs.

    Args:
        schedule: the ops.
        levels: cheapest first.
        groups: block tables of the KV-cache groups.
        max_model_len: of the target; levels read texts as long.
        thresholds: where a level's drafts end by entropy; None if none's do.
        sources: lookups next to the model of level 0, where the schedule chooses.
        confidence: takes in the rows of the drafts that the target verifies; None if nobody asks.
    """

    # See `cascade_steps.place`.
    lanes = 0

    def __init__(
        self,
        schedule: Schedule,
        levels: Sequence[Level],
        groups: KVGroups,
        max_model_len: int,
        thresholds: DeviceThresholds | None = None,
        sources: ProgramSources | None = None,
        confidence: DraftConfidence | None = None,
    ) -> None:
        self.sources, self.confidence = sources, confidence
        self.schedule, self.levels = schedule, list(levels)
        self.groups, self.max_model_len = groups, max_model_len
        self.thresholds = thresholds

    def run(self, state: ProposalState) -> None:
        """Draft for all requests of `state`, which `cascade_steps.stage` has prepared."""
        for at, op in enumerate(self.schedule.ops):
            if at == self.schedule.tail:
                cascade_steps.begin_tail(state, self.schedule)
            if isinstance(op, Lookup):
                find = self.levels[0].runs if self.sources is None else self.sources.offer
                find(state)
                continue
            if isinstance(op, Choose):
                cast(ProgramSources, self.sources).choose(state)
                continue
            self._run_level(state, op)
        self._finish(state)

    def _run_level(self, state: ProposalState, op: Draft | Verify) -> torch.Tensor:
        """A forward pass of a level, whose logits it returns, and what it adds to the text."""
        logits = self._forward(state, op)
        if isinstance(op, Draft):
            self._draw(state, op, logits)
        elif self.levels[op.level].verifier == "none":
            self._append_unverified(state, op, logits)
        else:
            self._verify(state, op, logits)
        return logits

    def _forward(self, state: ProposalState, op: Draft | Verify) -> torch.Tensor:
        level: ProgramLevel = self.levels[op.level].runs
        cascade_steps.place(
            state,
            self.schedule,
            op,
            self.groups,
            self.max_model_len,
            committed_too=not level.in_target_cache,
            lanes=self.lanes,
        )
        return level.forward(state, op, self.schedule.num_logits(op))

    def _finish(self, state: ProposalState, drafter: int = -1) -> None:
        """Hand the draft of a level over, the horizontal tokens with it."""
        if self.schedule.horizontal_tokens:
            if self.thresholds is not None:
                pass_entropies_on(self.thresholds, state)
            cascade_steps.append_tail(state, self.schedule)
        cascade_steps.collect(state, self.schedule, drafter)

    def _draw(self, state: ProposalState, op: Draft, logits: torch.Tensor) -> None:
        """Append a token of level 0."""
        thresholds = row_thresholds(logits, state.temperature[0], state.filters)
        token_ids, lse = self._sample(state, op, logits, thresholds, op.draw)
        if self.thresholds is not None:
            end_unsure_drafts(self.thresholds, state, op, logits)
        if self.confidence is not None and self.schedule.num_levels == 1:
            self.confidence.measure(logits, state.slot, self.confidence.places[op.step])
        cascade_steps.commit_draft(state, op, logits, token_ids, lse, thresholds)

    def _sample(
        self,
        state: ProposalState,
        op: Draft,
        logits: torch.Tensor,
        thresholds: torch.Tensor,
        draw: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of level 0 and their rows' logsumexps, see `sample_row`."""
        return sample_row(
            logits,
            state.temperature[0],
            state.seeds,
            state.draws,
            level=0,
            draw_offset=draw,
            thresholds=thresholds,
            positions=_last_positions(state, op),
        )

    def most_verified(self, op: Verify) -> int:
        """Tokens of a draft for which kernels are compiled."""
        return op.draft_length

    def _append_unverified(self, state: ProposalState, op: Verify, logits: torch.Tensor) -> None:
        """Keep the draft from below and draw a token after it; `tools.reference.cascade`."""
        taken = state.drafted[op.level - 1].clone()
        # Rows and fed tokens after the ends of the drafts are nobody's.
        last = logits.index_select(0, state.row_starts[op.draft_length][:-1] + taken)
        fed = state.positions[: state.batch * op.query_length].view(state.batch, -1)
        at = taken + (op.query_length - op.draft_length - 1)
        temperature = state.temperature[op.level]
        thresholds = row_thresholds(last, temperature, state.filters)
        token_ids, lse = sample_row(
            last,
            temperature,
            state.seeds,
            state.draws,
            level=op.level,
            draw_offset=op.draw,
            thresholds=thresholds,
            positions=fed.gather(1, at.long()[:, None])[:, 0],
        )
        if self.thresholds is not None:
            end_unsure_drafts(self.thresholds, state, op, last)
        if self.confidence is not None and op.level == self.schedule.num_levels - 1:
            own = torch.where(state.origin >= 0, state.slot, -1)
            self.confidence.measure(last, own, state.origin.long() + taken)
        cascade_steps.commit_unverified(state, op, last, token_ids, lse, thresholds, taken)

    def _verify(self, state: ProposalState, op: Verify, logits: torch.Tensor) -> None:
        below, rows_per_request = op.level - 1, op.draft_length + 1
        temperature = state.temperature[op.level]
        thresholds = row_thresholds(
            logits, temperature, state.filters, rows_per_request=rows_per_request
        )
        draft_temperature = state.temperature[below]
        if below == 0 and self.sources is not None:
            # A lookup's tokens are point masses.
            draft_temperature = draft_temperature * self.sources.drawn[state.slot.long()]
        result = verify_chain_padded(
            logits,
            state.rows[below],
            state.sampled[: logits.shape[0]],
            state.row_starts[op.draft_length],
            state.request,
            temperature,
            state.seeds,
            state.draws,
            max_draft_tokens=self.most_verified(op),
            method=self.levels[op.level].verifier,
            level=op.level,
            draw_offset=op.draw,
            draft_temperature=draft_temperature,
            draft_lse=None if state.rows[below] is None else state.lse[below],
            draft_index=state.request,
            draft_length=state.drafted[below],
            thresholds=thresholds,
            positions=state.positions[: state.batch * op.query_length],
            position_skip=op.query_length - rows_per_request,
        )
        if self.thresholds is not None:
            end_unsure_drafts(self.thresholds, state, op, logits, result)
        if self.confidence is not None and op.level == self.schedule.num_levels - 1:
            self.confidence.measure_verified(logits, state.slot, state.origin, result.num_emitted)
        cascade_steps.commit_verify(state, op, logits, result, thresholds)


def _last_positions(state: ProposalState, op: Draft) -> torch.Tensor:
    """int64 [B], of the last token that each request has fed."""
    fed = state.positions[: state.batch * op.query_length].view(state.batch, -1)
    if op.query_length == 1:
        return fed[:, 0]
    # Kernels are compiled for strides and alignments, which one request has too.
    return fed[:, -1].clone(memory_format=torch.contiguous_format)
