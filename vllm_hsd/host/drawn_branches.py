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
from vllm_hsd.kernels.chain_verify import ChainResult
from vllm_hsd.kernels.drawn_rows import DrawnResult, verify_drawn_rows


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
        together, found = self._verify_together(part, *rest, **options)
        verified = chain._replace(
            token_ids=torch.where(together[:, None], found.token_ids, chain.token_ids),
            num_accepted=torch.where(together, found.num_accepted, chain.num_accepted),
            num_emitted=torch.where(together, found.num_emitted, chain.num_emitted),
        )
        # Every further token is drawn from the target's row, so where it ends is not what it says.
        emitted = super().follow(verified, *rest, **options)
        winner = self.winner[part]
        winner.copy_(torch.where(together & (winner == 0), found.winner, winner))
        return emitted

    def _verify_together(
        self,
        part: slice,
        logits: torch.Tensor,
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
        step, speculator, state = self.step, self.runner.speculator, self.state
        chain_logits = state.rows[0]
        assert step is not None and chain_logits is not None
        slots = idx_mapping.long()
        index, own = state.row_of_slot[slots], temperature[slots]
        held = (self.counts[part] - 1).clamp(min=0)
        together = (own > 0) & (held[:, 1:] > 0).any(1) & (index >= 0)
        index = index.clamp(min=0)
        held[:, 0] = torch.minimum(held[:, 0], state.draft_length[index.long()])
        drawn_at = (speculator.parameters.temperature * speculator.scales[-1])[slots]
        begin = int(step.batch.cu_num_logits_np[part.start])
        found = verify_drawn_rows(
            logits,
            chain_logits,
            self.drafts.rows,
            step.inputs[begin : begin + len(logits)],
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
