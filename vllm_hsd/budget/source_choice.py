"""Several lookups in the place of the lowest level, on the device.

All of them search, each offer is compared with the text that is verified later, and the one that is
expected to give most drafts. Nothing is read on the host, so all of it is part of a CUDA graph. A
step's length is the scheduler's, so that no token has a price of its own. The planner's
`tools.planner.lookup_choice` is the same in NumPy.

A model or a head may be the last source. It drafts for every request, and where a lookup is chosen
that one's tokens take the place of its own, as point masses. The choice is lossless because it goes
by the texts so far, the lookups' offers and past acceptance: never by a token that was drawn in
this step, or by how sure the model was of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from vllm_hsd.budget import constants
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.cascade.suffix_lookup import Offers
from vllm_hsd.kernels import branch_kernels, source_kernels
from vllm_hsd.kernels.blocks import padded_size


class Estimates(NamedTuple):
    """How likely a lookup's tokens are accepted after the ones before, by its own account.

    Attributes:
        values: float64, [n] for each place of a draft, or [V] for each token before.
        by_token: which of the two.
    """

    values: torch.Tensor
    by_token: bool


_TABLE = {"PLACES": constants.PLACES, "BINS": constants.BINS}
# A product that is rounded before it is added, as on the host.
_EXACT = {"num_warps": 1, "enable_fp_fusion": False}


class SourcesLookup:
    """Lookups next to each other, see `program.ProgramLookup`.

    Args:
        lookups: each with its estimates, None for one that returns `Offers` with their own.
        min_acceptance: a draft ends before the token that is less likely to be accepted.
        slots: requests at the same time.
        length: most tokens of a draft.
        device: of the requests' texts.
        has_drafter: a model or a head is the last source; see `choose`.
        rows: most drafts of a request that the target verifies together.
        batch: most requests of a proposal.

    Attributes:
        branches: int32 [batch, rows - 1, length], tokens of the rows after the chain, and
        branch_counts: int32 [batch, rows - 1], of the last proposal.
        chosen: int32 [slots + 1], the source of each slot's draft, -1 for none.
        drawn: float32 [slots + 1], 1 where a slot's draft is the drafter's.
        selected: numbers of the sources that draft.
        wanted: int64 [1], drafts for which a whole one of the drafter was expected to be the best;
            only ever grows. See `FurtherPasses`.
        shared: float64 [2, S, PLACES, BINS]; own: float64 [2, S, slots + 1]; see
            `budget.acceptance.AcceptanceEstimates`. The last slot is of rows that draft nothing.
        counts, token_ids, estimates, expected: [S, slots + 1, ...], the last offers of each slot,
            as of `tools.planner.lookup_choice.LookupChoice`.
        starts: int64 [slots + 1], positions at which they begin.
    """

    def __init__(
        self,
        lookups: Sequence[tuple[Callable[..., Offers | None], Estimates | None]],
        min_acceptance: float,
        slots: int,
        length: int,
        device: torch.device,
        has_drafter: bool = False,
        *,
        rows: int = 1,
        batch: int = 0,
    ) -> None:
        self.lookups, self.slots, self.length = list(lookups), slots, length
        self.has_drafter = has_drafter
        self.count = count = len(self.lookups) + has_drafter
        self.selected = set(range(count))

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        table = _TABLE.values()
        self.shared, self.own = zeros(2, count, *table), zeros(2, count, slots + 1)
        self.counted = self.shared.flatten(2).int()
        self.chosen = zeros(slots + 1, dtype=torch.int32)
        self.drawn = zeros(slots + 1, dtype=torch.float32)
        self.wanted = zeros(1, dtype=torch.int64)
        self.starts = zeros(slots + 1, dtype=torch.int64)
        self.counts = zeros(count, slots + 1, dtype=torch.int32)
        self.token_ids = zeros(count, slots + 1, length, dtype=torch.int32)
        self.estimates, self.expected = (zeros(count, slots + 1, length) for _ in range(2))
        self.branches = zeros(batch, rows - 1, length, dtype=torch.int32)
        self.branch_counts = zeros(batch, rows - 1, dtype=torch.int32)
        # In memory: numbers that are arguments of a launch have 32 bits.
        numbers = constants.MEMORY, constants.REMEMBERED, constants.PRIOR_WEIGHT, min_acceptance
        each = torch.tensor(numbers, dtype=torch.float64, device=device)
        self.memory, self.remembered, self.prior, self.least = each[:, None]
        # What is known of a drafter's tokens before they are drawn: their places.
        self.of_drafter = Estimates(zeros(length) + constants.PRIOR_ACCEPTANCE, by_token=False)
        self.lanes = {"N": length, "LANES": padded_size(length)}

    def forget(self, slots: torch.Tensor) -> None:
        """Forget these requests: int64 [n]."""
        # An assigned number would be copied to the device, which waits for it.
        self.own.index_fill_(2, slots, 0.0)
        self.counts.index_fill_(1, slots, 0)

    def __call__(self, state: ProposalState, text: torch.Tensor) -> None:
        """Append one lookup's offer to every text, `requested[0]` tokens at most.

        Args:
            text: int32 [max_num_reqs, max_model_len], all committed tokens; its memory must not
                move.
        """
        self.offer(state, text)
        self.choose(state)

    def offer(self, state: ProposalState, text: torch.Tensor) -> None:
        """Compare the last offers with the text, and keep what the lookups offer now."""
        source_kernels.judge_offers_kernel[(state.batch, self.count)](
            self.counted,
            self.own,
            self.starts,
            self.counts,
            self.token_ids,
            self.estimates,
            self.expected,
            self.memory,
            *state.windows,
            state.base,
            state.end,
            *_requests(state),
            text,
            text.stride(0),
            self.slots,
            **self.lanes,
            **_TABLE,
            **_EXACT,
        )
        source_kernels.learn_kernel[(self.count,)](
            self.shared, self.counted, self.remembered, **_TABLE, **_EXACT
        )
        for i, (lookup, estimates) in enumerate(self.lookups):
            if i in self.selected:
                self._keep(state, i, lookup(state, text=text), estimates)

    def choose(self, state: ProposalState) -> None:
        """Draft the best offer; a drafter's is what it has appended to the texts by now.

        The next best ones whose first token is another one become `branches`.
        """
        if self.has_drafter:
            self._keep(state, self.count - 1, None, self.of_drafter)
        offered = (
            *state.windows,
            state.end,
            state.drafted[0],
            state.requested[0],
            *_requests(state),
            self.own,
            self.counts,
            self.token_ids,
            self.expected,
            self.prior,
            self.least,
        )
        source_kernels.choose_offer_kernel[(state.batch,)](
            *offered,
            self.chosen,
            self.drawn,
            self.wanted,
            state.temperature[0],
            self.slots,
            SOURCES=self.count,
            HAS_DRAFTER=self.has_drafter,
            **self.lanes,
            **_EXACT,
        )
        if branches := self.branches.shape[1]:
            branch_kernels.choose_branches_kernel[(state.batch,)](
                self.branches,
                self.branch_counts,
                *offered,
                self.slots,
                SOURCES=self.count,
                BRANCHES=branches,
                FIRSTS=padded_size(branches + 1),
                **self.lanes,
                **_EXACT,
            )

    def select(self, sources: Sequence[int]) -> None:
        """Let only these draft from now on, by their numbers.

        Raises:
            ValueError: there are no such sources.
        """
        if not sources or not set(sources) <= set(range(self.count)):
            raise ValueError(f"sources {list(sources)} are not among the level's {self.count}.")
        self.selected = set(sources)
        self.counts.zero_()

    def prefers_drafter(self, state: ProposalState) -> torch.Tensor:
        """bool [B], whose drafts are expected to be best where the drafter draws whole ones.

        After `offer`; the rule of `choose`, read on the host.
        """
        slots = torch.where(state.slot >= 0, state.slot, self.slots).long()
        scale = (self.own[0][:, slots] + self.prior) / (self.own[1][:, slots] + self.prior)
        each = (self.expected[:, slots] * scale[..., None]).clamp(max=1.0)
        counts = self.counts[:, slots].clone()
        counts[-1] = self.length
        places = torch.arange(self.length)
        held = places < torch.minimum(counts, state.requested[0])[..., None]
        survival = each.masked_fill(~held, 0.0).cumprod(2)
        value = survival.masked_fill(survival < self.least, 0.0).sum(2)
        best: torch.Tensor = (value[-1] > 0) & (value[-1] >= value[:-1].amax(0))
        return best

    @property
    def lookups_selected(self) -> bool:
        """Whether any lookup is among the sources that draft."""
        return any(i in self.selected for i in range(len(self.lookups)))

    def drafter_selected(self) -> bool:
        """Whether the drafter is among the sources that draft."""
        return self.has_drafter and self.count - 1 in self.selected

    def _keep(
        self,
        state: ProposalState,
        source: int,
        offers: Offers | None,
        estimates: Estimates | None,
    ) -> None:
        """Take what a source has appended from the texts and remember it."""
        values = offers.confidence if offers is not None else None
        if estimates is not None:
            values = estimates.values
        source_kernels.keep_offer_kernel[(state.batch,)](
            self.starts,
            self.counts[source],
            self.token_ids[source],
            self.estimates[source],
            self.expected[source],
            *self.shared[:, source],
            self.prior,
            *state.windows,
            state.base,
            state.end,
            state.drafted[0],
            *_requests(state),
            self.slots,
            values,
            TEXTS=len(offers.confidence) if offers is not None else 0,
            BY_TOKEN=estimates is not None and estimates.by_token,
            **self.lanes,
            **_TABLE,
            **_EXACT,
        )


def _requests(state: ProposalState) -> tuple[torch.Tensor, torch.Tensor]:
    return state.requested[-1], state.slot
