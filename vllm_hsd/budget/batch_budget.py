"""One draft length for all requests of a step, whichever is fastest, learned while serving.

`budget.draft_budget` for runners that schedule one draft length for a whole batch, and of whose
steps only the time as a whole is known. It looks only at times, at batch sizes and at what became
of earlier drafts, so the text stays lossless.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_hsd.budget.acceptance import AcceptanceEstimates
from vllm_hsd.budget.constants import PRIOR_ACCEPTANCE, PRIOR_WEIGHT, TRIAL_STEPS
from vllm_hsd.budget.step_times import StepTimes
from vllm_hsd.budget.trials import Trials


class BatchBudget:
    """Chooses between drafts of a few lengths and none, by the size of the batch.

    Tokens per second are largest where every token that is drafted pays, and none other: the rule
    of `budget.draft_budget`, for lengths that few steps are enough to time.

    Args:
        lengths: tokens of a draft, at least 1.
        max_batch: most requests of a step.

    Attributes:
        lengths: ascending, 0 the first.
        times: seconds of steps with each length, by requests.
        acceptance: of the tokens of all requests by their place; a draft that was not filled counts
            as rejected from there on.
    """

    def __init__(self, lengths: Sequence[int], max_batch: int) -> None:
        self.lengths = [0, *sorted(lengths)]
        self.times = [StepTimes(max_batch) for _ in self.lengths]
        self.acceptance = AcceptanceEstimates(1, 1)
        # Each length for each power of two of requests, all of which a trial is made on.
        self.trials = Trials(len(self.lengths) * (max_batch.bit_length() + 1), TRIAL_STEPS - 2)

    def choose(self, size: int) -> int:
        """Tokens to draft for each of `size` requests: one of the lengths."""
        rates, first = self.rates(size), len(self.lengths) * size.bit_length()
        best = len(rates) - 1
        if None not in (rates[0], rates[-1]):
            best = max(range(len(rates)), key=lambda i: rates[i] or 0.0)
        self.trials.pays(first + best)
        for i, rate in enumerate(rates):
            # Where the next longer draft loses, those after it lose more; all are judged by none.
            nearby = not i or abs(i - best) == 1 or rate is None
            if i != best and nearby and self.trials.due(first + i):
                if i > best:
                    # What a trial finds is to outweigh what was known before.
                    self._forget()
                return self.lengths[i]
        return self.lengths[best]

    def observe(self, length: int, accepted: np.ndarray, seconds: float) -> None:
        """Take in a step in which every request decoded.

        Args:
            length: tokens of each request that were verified, and drafted for the next step.
            accepted: [requests] int64 tokens of the drafts.
            seconds: of the step.
        """
        size = len(accepted)
        self.times[self.lengths.index(length)].observe(size, seconds)
        if length:
            estimates = np.full((size, length), PRIOR_ACCEPTANCE)
            slots, verified = np.zeros(size, np.int64), np.full(size, length)
            self.acceptance.observe(0, slots, estimates, estimates, verified, accepted)

    def rates(self, size: int) -> list[float | None]:
        """Tokens per second of a request with drafts of each length; None for one not yet timed."""
        survival = np.cumprod(self.acceptance.expected(0, self.lengths[-1]))
        return [
            None if times.empty else (1 + float(survival[:n].sum())) / times.seconds(size)
            for n, times in zip(self.lengths, self.times, strict=True)
        ]

    def _forget(self) -> None:
        """Let no more than a few tokens of each kind count."""
        verified = self.acceptance.shared[1]
        self.acceptance.shared *= PRIOR_WEIGHT / np.maximum(verified, PRIOR_WEIGHT)
