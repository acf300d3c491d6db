"""Several lookups in the place of the lowest level on the device: `core.source_choice` for tensors.

All of them search, each offer is compared with the text that is verified later, and the one that is
expected to give most drafts. Nothing is read on the host, so all of it is part of a CUDA graph. A
step's length is the scheduler's, so that no token has a price of its own: what is drafted is what
`core.source_choice` drafts for nothing, up to the end of one lookup's offer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from vllm_hsd.core.acceptance import BINS, MEMORY, PLACES, PRIOR_TOKENS, REMEMBERED
from vllm_hsd.kernels import source_kernels
from vllm_hsd.kernels.blocks import padded_size
from vllm_hsd.runner_v2.proposal_state import ProposalState
from vllm_hsd.runner_v2.suffix_lookup import Offers


class Estimates(NamedTuple):
    """How likely a lookup's tokens are accepted after the ones before, by its own account.

    Attributes:
        values: float64, [n] for each place of a draft, or [V] for each token before.
        by_token: which of the two.
    """

    values: torch.Tensor
    by_token: bool


class SourcesLookup:
    """Lookups next to each other, see `program.ProgramLookup`.

    Args:
        lookups: each with its estimates, None for one that returns `Offers` with their own.
        min_acceptance: a draft ends before the token that is less likely to be accepted.
        slots: requests at the same time.
        length: most tokens of a draft.
        device: of the requests' texts.

    Attributes:
        shared: float64 [2, S, PLACES, BINS]; own: float64 [2, S, slots + 1]; see
            `core.acceptance.AcceptanceEstimates`. The last slot is of rows that draft nothing.
        counts, token_ids, estimates, expected: [S, slots + 1, ...], the last offers of each slot,
            see `core.source_choice.Offers`.
        starts: int64 [slots + 1], positions at which they begin.
    """

    def __init__(
        self,
        lookups: Sequence[tuple[Callable[..., Offers | None], Estimates | None]],
        min_acceptance: float,
        slots: int,
        length: int,
        device: torch.device,
    ) -> None:
        self.lookups, self.slots, self.length = list(lookups), slots, length
        count = len(self.lookups)

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.shared, self.own = zeros(2, count, PLACES, BINS), zeros(2, count, slots + 1)
        self.counted = zeros(2, count, PLACES * BINS, dtype=torch.int32)
        self.starts = zeros(slots + 1, dtype=torch.int64)
        self.counts = zeros(count, slots + 1, dtype=torch.int32)
        self.token_ids = zeros(count, slots + 1, length, dtype=torch.int32)
        self.estimates, self.expected = (zeros(count, slots + 1, length) for _ in range(2))
        # In memory: numbers that are arguments of a launch have 32 bits.
        numbers = MEMORY, REMEMBERED, PRIOR_TOKENS, min_acceptance
        each = torch.tensor(numbers, dtype=torch.float64, device=device)
        self.memory, self.remembered, self.prior, self.least = each.split(1)

    def forget(self, slots: torch.Tensor) -> None:
        """Know nothing of these requests: int64 [n]."""
        self.own[:, :, slots] = 0.0
        self.counts[:, slots] = 0

    def __call__(self, state: ProposalState, text: torch.Tensor) -> None:
        """Append one lookup's offer to every text, `requested[0]` tokens at most.

        Args:
            text: int32 [max_num_reqs, max_model_len], all committed tokens; its memory must not
                move.
        """
        batch, sources = state.batch, len(self.lookups)
        window, requests = (state.window, state.window.stride(0)), (state.requested[-1], state.slot)
        lanes = {"N": self.length, "LANES": padded_size(self.length)}
        table = {"PLACES": PLACES, "BINS": BINS}
        # A product that is rounded before it is added, as on the host.
        exact = {"num_warps": 1, "enable_fp_fusion": False}
        source_kernels.judge_offers_kernel[(batch, sources)](
            self.counted,
            self.own,
            self.starts,
            self.counts,
            self.token_ids,
            self.estimates,
            self.expected,
            self.memory,
            *window,
            state.base,
            state.end,
            *requests,
            text,
            text.stride(0),
            self.slots,
            **lanes,
            **table,
            **exact,
        )
        source_kernels.learn_kernel[(sources,)](
            self.shared, self.counted, self.remembered, **table, **exact
        )
        for i, (lookup, estimates) in enumerate(self.lookups):
            offers = lookup(state, text=text)
            values = offers.confidence if offers is not None else None
            if estimates is not None:
                values = estimates.values
            source_kernels.keep_offer_kernel[(batch,)](
                self.starts,
                self.counts[i],
                self.token_ids[i],
                self.estimates[i],
                self.expected[i],
                *self.shared[:, i],
                self.prior,
                *window,
                state.base,
                state.end,
                state.drafted[0],
                *requests,
                self.slots,
                values,
                TEXTS=len(offers.confidence) if offers is not None else 0,
                BY_TOKEN=estimates is not None and estimates.by_token,
                **lanes,
                **table,
                **exact,
            )
        source_kernels.choose_offer_kernel[(batch,)](
            *window,
            state.end,
            state.drafted[0],
            state.requested[0],
            *requests,
            self.own,
            self.counts,
            self.token_ids,
            self.expected,
            self.prior,
            self.least,
            self.slots,
            SOURCES=sources,
            **lanes,
            **exact,
        )


def build(speculator: Any, level: Any) -> SourcesLookup:
    """The sources of a level's configuration."""
    device = speculator.device
    lookups = [
        (source.build_v2(speculator, 0), source.estimates_v2(device)) for source in level.sources
    ]
    length = speculator.schedule.kept_lengths[0]
    return SourcesLookup(lookups, level.min_acceptance, speculator.max_num_reqs, length, device)
