"""What a token costs a verifier, in tokens: by the times of its passes and its goodput."""

from __future__ import annotations

import numpy as np

from vllm_hsd.budget import constants
from vllm_hsd.budget.step_times import StepTimes

# A price that nothing pays.
FORBIDDEN = 1e9


class Goodput:
    """Times of one verifier's passes, and the tokens that its drafts have gained in them.

    Args:
        widest: most tokens that it reads of a request next to the last one.

    Attributes:
        times: seconds of its passes by tokens.
        emitted, spent: by batch size, exponentially forgotten: tokens emitted per request, and time
            in steps without drafts.
    """

    def __init__(self, widest: int) -> None:
        self.widest, self.times = widest, StepTimes()
        self.emitted, self.spent = np.ones((2, len(self.times.sizes)))
        # By requests, how often in a row their time without drafts was found to be old.
        self.unmeasured: dict[int, int] = {}
        # By requests, passes after which their time without drafts is old.
        self.pause: dict[int, int] = {}

    def gain(self, size: int) -> float:
        """The goodput reached over that without drafts, at least 1."""
        at = self.times.nearest(size)
        return float(max(self.emitted[at] / self.spent[at], 1.0))

    def rate(self, size: int) -> float:
        """Tokens per second at the goodput reached, which is at least that without drafts."""
        return float(self.gain(size) * size / self.times.seconds(size))

    def prices(self, drafting: int, size: int) -> np.ndarray:
        """[M + 1] float64 tokens that it costs to verify m tokens of `drafting` of `size` requests.

        Below 0 where a pass over more takes less time. All cost `FORBIDDEN` where the time without
        drafts is to be measured, and those that make a pass more than twice as large as any seen:
        its time would be a guess.
        """
        more = np.arange(drafting * self.widest + 1)
        if self._wants_plain_step(size):
            return FORBIDDEN * more
        seconds = self.times.seconds(size + more)
        found: np.ndarray = self.rate(size) * (seconds - seconds[0])
        found[1:][size + more[1:] > 2 * self.times.largest] = FORBIDDEN
        return found

    def learn(self, size: int, drafted: int, emitted: int, seconds: float) -> None:
        """Update the goodput from one verified draft of each of `size` requests.

        Args:
            size: requests.
            drafted, emitted: tokens that were verified, and that the requests got.
            seconds: of drafting.
        """
        if not size or self.times.empty:
            return
        plain, verified = self.times.seconds(size), self.times.seconds(size + drafted)
        at = self.times.nearest(size)
        self.emitted[at] = constants.SHORT_MEMORY * self.emitted[at] + emitted / size
        self.spent[at] = constants.SHORT_MEMORY * self.spent[at] + (verified + seconds) / plain

    def _wants_plain_step(self, size: int) -> bool:
        """Whether the time of `size` requests without drafts is old, and is measured now.

        The first pass may have been a slow one, and where it seems that drafts are free the next
        would never come: it is measured soon again, and then ever more seldom.

        Not the first time it is found to be old: a size may last for a step only, and that one may
        hold a prompt, whose time says nothing. In vain, it is asked for ever more seldom.
        """
        at = self.times.nearest(size)
        hardly = np.log(self.emitted[at] / self.spent[at]) < constants.NOTICEABLE
        pause = self.pause.get(size, constants.TRIAL_STEPS)
        longest = constants.FIRST_PAUSE if hardly else constants.LONGEST_PAUSE
        if self.times.age(size) <= min(pause, longest):
            if self.unmeasured.pop(size, None):
                self.pause[size] = min(2 * pause, constants.LONGEST_PAUSE)
            return False
        self.unmeasured[size] = count = self.unmeasured.get(size, 0) + 1
        return count > 1 and count.bit_count() == 1
