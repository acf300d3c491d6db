"""Several drafts of each request, drawn by one model: what is kept of them, and runs.

They are drawn independently of each other, whole, and verified together (`drawn_branches`; Zhou et
al., "Overcoming Joint Intractability with Lossless Hierarchical Speculative Decoding", Table 2;
Stratos, "Speculative Sampling", section 2). At temperature 0, or coupled by the noise of a seed,
they would be equal: there the further ones begin with the likeliest other tokens, as point masses.

One is drawn after the other, in the same places of the cache, all after the first pass. The chain
comes last, so that its tokens are what the cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from vllm_hsd.cascade import cascade_steps
from vllm_hsd.cascade.program import Program
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.cascade.schedule import Draft
from vllm_hsd.kernels.filter_rows import row_thresholds


@dataclass(frozen=True)
class SeveralDrafts:
    """The further drafts of a proposal of B requests, R drafts of K tokens each.

    Attributes:
        branches: int32 [B, R - 1, K], their tokens.
        branch_counts: int32 [B, R - 1], how many; 0 for no draft.
        rows: [R - 1, B', K, V] logits that they were drawn from; of at most B' requests, more
            draft a chain each.
    """

    branches: torch.Tensor
    branch_counts: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def allocate(
        cls, state: ProposalState, drafts: int, sizes: Sequence[int], most: int
    ) -> SeveralDrafts:
        """Beside a state.

        Args:
            state: of the chains.
            drafts: R.
            sizes: batch sizes to which proposals are padded, ascending; the last is the state's.
            most: requests that may draft several.
        """
        chain = state.rows[0]
        assert chain is not None
        batch, length, _ = chain.shape
        size = next(size for size in sizes if size >= min(most, batch))
        return cls(
            state.draft_length.new_zeros(batch, drafts - 1, length),
            state.draft_length.new_zeros(batch, drafts - 1),
            chain.new_zeros(drafts - 1, size, *chain.shape[1:]),
        )

    @property
    def batch(self) -> int:
        """B', most requests of a proposal of several drafts."""
        return self.rows.shape[1]

    def keep(self, state: ProposalState, row: int, window: int) -> None:
        """Take the draft that ends the texts, and end the texts before it.

        Args:
            row: from 1 on.
            window: tokens of the texts that are committed.
        """
        batch, _, length = self.branches[: state.batch].shape
        self.branches[:batch, row - 1] = state.window[:, window : window + length]
        self.branch_counts[:batch, row - 1] = state.drafted[0]
        state.end.copy_(state.start[0])
        state.drafted[0].zero_()


class SeveralDraftsProgram(Program):
    """A program of a model alone that draws several drafts.

    Args:
        kept: where the further ones go.
        arguments: see `Program`.
    """

    def __init__(self, *arguments: Any, kept: SeveralDrafts, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.kept = kept

    def run(self, state: ProposalState) -> None:
        schedule, kept = self.schedule, self.kept
        first, *later = cast(tuple[Draft, ...], schedule.ops)
        length = schedule.draft_lengths[0]
        kept.branch_counts[: state.batch].zero_()
        logits = self._forward(state, first)
        thresholds = row_thresholds(logits, state.temperature[0], state.filters)
        # Positions are overwritten by the next pass.
        drawn = [
            self._sample(state, first, logits, thresholds, row * length)
            for row in range(schedule.drafts)
        ]
        others = other_tokens(logits, drawn[0][0], schedule.drafts - 1)
        for row in reversed(range(schedule.drafts)):
            token_ids, lse = drawn[row]
            own = state
            if row:
                own = replace(state, rows=[kept.rows[row - 1, : state.batch]])
                token_ids = torch.where(state.temperature[0] > 0, token_ids, others[:, row - 1])
            cascade_steps.commit_draft(own, first, logits, token_ids, lse, thresholds)
            for op in later:
                if op.row == row:
                    self._run_level(own, op)
            if row:
                kept.keep(state, row, schedule.window)
        cascade_steps.collect(state, schedule)


def other_tokens(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [B, count], the likeliest tokens of each row [B, V] but the given one [B].

    The last one again where there are no more.
    """
    most = min(count + 1, logits.shape[1])
    likeliest = logits.topk(most).indices
    is_given = (likeliest == token_ids[:, None]).int()
    order = is_given.argsort(dim=1, stable=True)
    found = likeliest.gather(1, order)[:, : max(most - 1, 1)]
    more = count - found.shape[1]
    return torch.cat([found, found[:, -1:].expand(-1, max(more, 0))], dim=1)[:, :count]
