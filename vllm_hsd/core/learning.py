"""What a cascade's rounds teach: times, acceptance, and what drafts cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_hsd.core.controller import DepthController
from vllm_hsd.core.drafts import DraftStore
from vllm_hsd.core.lowest_level import LowestLevel
from vllm_hsd.core.prices import PriceEstimates, Prices
from vllm_hsd.core.rounds import Round
from vllm_hsd.core.step_times import StepTimes


class Learning:
    """Listens to a cascade's rounds.

    Args:
        lowest: the cascade's lowest level, None without levels.
        drafts: one per level.
        num_slots: requests at the same time.
        controller: learns from every draft; None without one.

    Attributes:
        target_times: seconds of the target's step by tokens; reported by what runs the target.
        level_times: per level, see `DepthController.level_times`.
        prices: what drafts of several sources cost; None without them.
    """

    def __init__(
        self,
        lowest: LowestLevel | None,
        drafts: Sequence[DraftStore],
        num_slots: int,
        controller: DepthController | None = None,
    ) -> None:
        self.lowest, self.num_levels, self.controller = lowest, len(drafts), controller
        self.target_times, self.level_times = StepTimes(), [StepTimes() for _ in drafts]
        if controller is not None:
            self.target_times, self.level_times = controller.target_times, controller.level_times
        self.prices: PriceEstimates | None = None
        if lowest is not None:
            lowest.times = self.level_times[0]
            if lowest.choice is not None:
                verifiers = [*self.level_times, self.target_times]
                self.prices = PriceEstimates(drafts[0].length, verifiers, lowest.model_times)
        # Requests that could draft for the step under way, and the seconds that drafting took.
        self.requested, self.drafting_seconds = np.zeros(num_slots, dtype=bool), 0.0

    def current_prices(self, size: int) -> list[Prices] | None:
        """For `DraftBatch.prices` with `size` requests; None where no source chooses.

        Level 0 verifies nothing: its entry is not to be read.

        They depend on times, so the ranks of a tensor-parallel target must agree on one's.
        """
        if self.prices is None or self.lowest is None:
            return None
        cost, verifiers = self.lowest.model_cost, range(1, self.num_levels + 1)
        paid = [self.prices.prices(verifier, size, cost) for verifier in verifiers]
        return [paid[0], *paid]

    def observe(self, finished: Round) -> None:
        """Take in a round."""
        slots, drafts = finished.slots, finished.drafts
        counts, accepted = drafts.counts[slots], finished.accepted
        facing_target = finished.verifier == self.num_levels
        if not facing_target:
            assert accepted is not None
            times = self.level_times[finished.verifier]
            times.observe(finished.computed, finished.verifying_seconds)
            if self.prices is not None:
                drafted, emitted = int(counts.sum()), int((accepted + 1).sum())
                seconds = finished.drafting_seconds
                self.prices.observe(finished.verifier, len(slots), drafted, emitted, seconds)
        elif finished.requested is not None:
            self.requested[slots] = finished.requested > 0
            self.drafting_seconds = finished.drafting_seconds
            if not counts.any():
                # Without drafts there is nothing to verify: the round ends here.
                drafting = slots[finished.requested > 0]
                self._close_round(drafts, drafting, np.zeros(len(drafting), dtype=np.int64))
        elif accepted is not None:
            self._close_round(drafts, slots, accepted)
        if self.controller is None:
            return
        pair = self.controller.pair(finished.level, finished.verifier)
        if finished.requested is not None:
            wanted = finished.requested > 0
            filled = int((counts[wanted] > 0).sum())
            self.controller.acceptance.count(pair, int(wanted.sum()), filled)
        if accepted is not None:
            self.controller.acceptance.observe(pair, slots, counts, accepted)

    def _close_round(self, drafts: DraftStore, slots: np.ndarray, accepted: np.ndarray) -> None:
        """Take in what became of the target's last drafts of `slots`, and what they cost."""
        own = self.requested[slots]
        self.requested[slots] = False
        if self.prices is not None:
            drafted = int(drafts.counts[slots[own]].sum())
            emitted, size = int((accepted[own] + 1).sum()), int(own.sum())
            self.prices.observe(self.num_levels, size, drafted, emitted, self.drafting_seconds)
