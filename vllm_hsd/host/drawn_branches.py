"""Several drawn drafts of a request as rows of the target's pass: `several_drafts` verified.

A sampled request's rows are verified together, by Traversal Verification of their tree. Others have
point masses next to the chain, as those of lookups. Both go on along a row that has the last token
that was emitted: the target has computed what follows it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.cascade.several_drafts import SeveralDrafts
from vllm_hsd.host.branches import HostedBranches
from vllm_hsd.kernels.blocks import aligned
from vllm_hsd.kernels.chain_verify import ChainResult
from vllm_hsd.kernels.drawn_rows import DrawnResult, verify_drawn_rows

# Bytes of rows that are laid out at a time, which no profile of vLLM's measures.
MOST_BYTES = 1 << 28


class DrawnBranches(HostedBranches):
    """The drafts of a runner's requests.

    Args:
        runner, state, chained: see `HostedBranches`.
        drafts: those after the chain.
    """

    def __init__(
        self, runner: Any, state: ProposalState, drafts: SeveralDrafts, chained: np.ndarray
    ) -> None:
        super().__init__(runner, state, drafts, chained)
        self.drafts = drafts

    def follow(
        self,
        chain: ChainResult,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        draws: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rest = logits, cu_num_logits, idx_mapping, draws
        if self.step is None:
            return super().follow(chain, *rest, **options)
        part = slice(self.verified, self.verified + len(idx_mapping))
        outcome = [*(each.clone() for each in chain[:3]), torch.zeros_like(self.winner[part])]
        having = np.flatnonzero(self.step.several[part])
        # What it takes grows with the requests of a call: vLLM puts those that draft first.
        count, size = int(having.max(initial=-1)) + 1, self._most_together(logits)
        begin = int(self.step.batch.cu_num_logits_np[part.start])
        inputs = aligned(self.step.inputs[begin : begin + len(logits)])
        counts = aligned(self.counts[part])
        for first in range(0, count, size):
            some = slice(first, min(first + size, count))
            ends = cu_num_logits[first : some.stop + 1]
            own = counts[some], logits, inputs, ends, idx_mapping[some], draws
            where, found = self._verify_together(*own, **options)
            for kept, new in zip(outcome, found, strict=True):
                kept[some] = torch.where(where.view(-1, *[1] * (new.ndim - 1)), new, kept[some])
        token_ids, accepted, emitted, winners = outcome
        verified = ChainResult(token_ids, accepted, emitted, chain.target_lse)
        # Every further token is drawn from the target's row, so where it ends is not what it says.
        followed = super().follow(verified, *rest, **options)
        winner = self.winner[part]
        winner.copy_(torch.where(winner == 0, winners, winner))
        return followed

    def _most_together(self, logits: torch.Tensor) -> int:
        """Requests that one call verifies; fours, since kernels are compiled for alignments."""
        further, _, length, vocab_size = self.drafts.rows.shape
        each = 2 * ((further + 1) * length + 1) * vocab_size * logits.element_size()
        return max(MOST_BYTES // each // 4, 1) * 4

    def _verify_together(
        self,
        counts: torch.Tensor,
        logits: torch.Tensor,
        inputs: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        draws: torch.Tensor,
        *,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        level: int,
        thresholds: torch.Tensor | None,
        **_: Any,
    ) -> tuple[torch.Tensor, DrawnResult]:
        """(bool [n], requests whose rows are verified together; what these come to)."""
        speculator, state = self.runner.speculator, self.state
        chain_logits = state.rows[0]
        assert chain_logits is not None
        slots = idx_mapping.long()
        index, own = state.row_of_slot[slots], temperature[slots]
        held = (counts - 1).clamp(min=0)
        together = (own > 0) & (held[:, 1:] > 0).any(1) & (index >= 0)
        index = index.clamp(min=0)
        held[:, 0] = torch.minimum(held[:, 0], state.draft_length[index.long()])
        drawn_at = (speculator.parameters.temperature * speculator.scales[-1])[slots]
        found = verify_drawn_rows(
            logits,
            chain_logits,
            self.drafts.rows,
            inputs,
            cu_num_logits,
            held * together[:, None],
            index,
            torch.where(together, own, 1.0),
            torch.where(together, drawn_at, 1.0),
            seeds[slots],
            draws[slots],
            level=level,
            thresholds=thresholds,
        )
        return together, found
