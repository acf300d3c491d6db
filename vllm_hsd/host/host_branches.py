"""Branches where the host reads how long they are: on a CPU every token costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_hsd.budget.prices import cut
from vllm_hsd.budget.source_choice import SourcesLookup
from vllm_hsd.cascade.counters import Count
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.host.branches import HostedBranches
from vllm_hsd.kernels.chain_verify import ChainResult


class HostBranches(HostedBranches):
    """Lists of draft tokens that end where a request's last branch does.

    Attributes:
        longest_used: most tokens of a row after its root in the last proposal.
        accepted: int64 [max_num_reqs], tokens of each chain that the target has accepted.
    """

    lookup: SourcesLookup

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.longest_used = self.longest
        self.listed = np.zeros(self.runner.max_num_reqs, dtype=np.int64)
        self.accepted = np.zeros(self.runner.max_num_reqs, dtype=np.int64)

    @property
    def _row(self) -> np.ndarray:
        """Counts of the lowest level."""
        row: np.ndarray = self.runner.speculator.counts.host.rows[0]
        return row

    @property
    def length(self) -> int:
        return self.longest_used

    def set_attn(self, kv_cache_config: Any) -> None:
        self.lengths = {self.most * (n + 1): n for n in range(1, self.longest + 1)}
        super().set_attn(kv_cache_config)

    def length_of(self, batch: Any) -> int | None:
        """Whole lists are those of the last proposal."""
        tokens, whole = batch.num_scheduled_tokens, self.most * (self.length + 1)
        return self.length if (tokens == whole).all() else None

    def flat_drafts(self, slots: np.ndarray, window: int, drafts: torch.Tensor) -> None:
        """In rows as long as any of the batch is."""
        branches = self._kept(slots)
        chains = self.state.draft_length.numpy().astype(np.int64)
        self.longest_used = max(1, int(chains.max()), int(branches.max()))
        super().flat_drafts(slots, window, drafts)
        counts = branches.numpy().astype(np.int64)
        self._row[Count.branches] += (counts > 0).sum()
        self._row[Count.branch_tokens] += counts.sum()
        rows = np.arange(1, self.most) * (self.length + 1)
        last = np.where(counts > 0, rows + counts, 0).max(1)
        self.listed = np.where(last > 0, last, chains)

    def follow(
        self,
        chain: ChainResult,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        draws: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.accepted[idx_mapping.numpy()] = chain.num_accepted.numpy()
        rest = logits, cu_num_logits, idx_mapping, draws
        token_ids, emitted = super().follow(chain, *rest, **options)
        more, row = (emitted - chain.num_emitted).numpy(), self._row
        row[Count.branches_followed] += (more > 0).sum()
        row[Count.followed_tokens] += more.sum()
        return token_ids, emitted

    def none(self, state: ProposalState) -> None:
        """No request of the proposal has branches."""
        self.lookup.branch_counts[: state.batch] = 0

    def keep_what_pays(
        self, state: ProposalState, drafts: np.ndarray, chains: np.ndarray, verify: np.ndarray
    ) -> np.ndarray:
        """Cut branches to the tokens that are worth their price next to chains.

        The target takes one row at most, of first tokens that differ, so what rows are expected
        to bring adds up.

        Args:
            drafts: bool [B], requests that draft.
            chains: float64 [n, N], survival of the tokens of their chains, 0 for none.
            verify: see `budget.prices.Plan`.

        Returns:
            int64 [n], tokens of each request's branches that are kept.
        """
        counts = self._kept(state.slot.numpy()).numpy()
        survival = self._survival(state)[drafts]
        every = np.concatenate((chains[:, None], survival), axis=1)
        worth, _ = cut(every.reshape(-1, every.shape[2]), verify, np.zeros(every.shape[2] + 1))
        kept: np.ndarray = worth.reshape(every.shape)[:, 1:].sum(2)
        counts[drafts] = kept
        total: np.ndarray = kept.sum(1)
        return total

    def _kept(self, slots: np.ndarray) -> torch.Tensor:
        """int32 [B, rows - 1] tokens of branches, 0 of chains alone."""
        counts = self.lookup.branch_counts[: len(slots)]
        counts[torch.from_numpy(self.chained[slots])] = 0
        return counts

    def _survival(self, state: ProposalState) -> np.ndarray:
        """[B, rows - 1, N] of the branches' tokens, 0 for none."""
        lookup, slots = self.lookup, state.slot.numpy()
        tokens = lookup.token_ids.numpy()[:, slots][:, :, None]
        branches = lookup.branches[: state.batch].numpy()
        counts = lookup.branch_counts[: state.batch].numpy()
        inside = np.arange(branches.shape[2]) < counts[..., None]
        offered = lookup.counts.numpy()[:, slots][..., None]
        same = ((tokens == branches) | ~inside).all(3) & (offered >= counts)
        prior = float(lookup.prior)
        accepted, expected = (own[:, slots].numpy() + prior for own in lookup.own)
        each = lookup.expected.numpy()[:, slots] * (accepted / expected)[..., None]
        survival = np.cumprod(np.minimum(each, 1.0), axis=2)[:, :, None]
        found: np.ndarray = np.where(same[..., None] & inside, survival, 0.0).max(0)
        return found
