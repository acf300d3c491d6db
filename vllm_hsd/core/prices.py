"""What drafting costs, in tokens: its time, times the tokens that this time is worth.

A request gains from a draft what it expects to be accepted, and pays for it with time of the whole
batch: the verifier reads more tokens, and a drafter runs. The goodput in the long run is largest if
every draft is taken whose gain is above its price at the goodput that is reached (a renewal reward
process), and none other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_hsd.core.step_times import StepTimes

# A token in the verifier's step, where no clock may be read: between machines that wait for
# weights (.01) and those that compute (.05).
FIXED_TOKEN_PRICE = 0.03
# Tokens that a step's time is worth where no clock may be read: drafts that pay give about so many.
FIXED_WORTH = 1.5
# A draft must be worth so many times its price: estimates are noisy, and the offer that looks best
# is the one that is overestimated.
_MARGIN = 1.1
# Nothing is worth this.
FORBIDDEN = 1e9
# Rounds after which an observation of the gain weighs half.
_HALF_LIFE = 50.0
# Steps for which what more tokens cost is taken to stay as it is, once so many steps were timed.
_STAYS, _TIMED = 8, 64
# Passes at other sizes after which the verifier's time without drafts is measured again.
_MEASURE_AGAIN = 512
# Rounds without a draft before one at a lower price, and how far this pause grows and that price
# falls while nothing is drafted then either.
_FIRST_PAUSE, _LONGEST_PAUSE, _CHEAPEST = 64, 4096, 1 / 16


@dataclass(frozen=True)
class Prices:
    """What drafting costs a request, in accepted tokens.

    Attributes:
        verify: [longest draft + 1] float64, that the verifier reads k more tokens of the request.
        forward: one forward pass of the drafter, for the whole batch.
        size: requests that share such a pass if all of them draft.
    """

    verify: np.ndarray
    forward: float
    size: int = 1

    @classmethod
    def fixed(cls, length: int, forward: float) -> Prices:
        """Prices that are the same today and tomorrow.

        Args:
            length: longest draft.
            forward: a forward pass of the drafter, in steps of the verifier.
        """
        return cls(FIXED_TOKEN_PRICE * np.arange(length + 1.0), FIXED_WORTH * forward)


class PriceEstimates:
    """Prices by verifier, from times learned while serving.

    Args:
        length: longest draft.
        verifier_times: of everything that may verify the drafts.
        forward_times: of the drafter, seconds of a forward pass by requests.
    """

    def __init__(
        self, length: int, verifier_times: Sequence[StepTimes], forward_times: StepTimes
    ) -> None:
        self.length = length
        self.verifier_times, self.forward_times = list(verifier_times), forward_times
        count = len(self.verifier_times)
        # Per verifier: emitted tokens per request, and time in steps without drafts, both forgotten
        # exponentially.
        self.emitted, self.spent = [1.0] * count, [1.0] * count
        self.idle, self.pause = [0] * count, [_FIRST_PAUSE] * count
        # Per verifier: requests, passes that its times had seen, and what more tokens cost then.
        self._extra: list[tuple[int, int, np.ndarray] | None] = [None] * count

    def observe(self, verifier: int, size: int, drafted: int, emitted: int, seconds: float) -> None:
        """Take in one round.

        Args:
            verifier: its number.
            size: requests that could draft.
            drafted, emitted: tokens of all of them.
            seconds: spent on drafting.
        """
        times = self.verifier_times[verifier]
        if not size or times.empty:
            return
        plain, verified = times.seconds(size), times.seconds(size + drafted)
        keep = 0.5 ** (1 / _HALF_LIFE)
        self.emitted[verifier] = keep * self.emitted[verifier] + emitted / size
        spent = (verified + seconds) / plain
        self.spent[verifier] = keep * self.spent[verifier] + spent
        if drafted:
            self.idle[verifier], self.pause[verifier] = 0, _FIRST_PAUSE
        else:
            self.idle[verifier] += 1

    def gain(self, verifier: int) -> float:
        """Tokens per time with drafts over those without, at least 1."""
        return max(self.emitted[verifier] / self.spent[verifier], 1.0)

    def prices(self, verifier: int, size: int, drafter_cost: float) -> Prices:
        """What a request pays if `size` requests draft.

        Args:
            drafter_cost: a forward pass of the drafter in steps of the verifier, until it is known.
        """
        times = self.verifier_times[verifier]
        if times.age(size) > _MEASURE_AGAIN:
            # Everything is measured against the time without drafts.
            return Prices(FORBIDDEN * np.arange(self.length + 1.0), FORBIDDEN)
        worth = _MARGIN * self.gain(verifier)
        verify = worth * self._extra_cost(verifier, size)
        if self.idle[verifier] >= self.pause[verifier]:
            # What long drafts cost may have been overestimated, and is not seen without any.
            self.idle[verifier] = 0
            verify = verify * max(_FIRST_PAUSE / (2 * self.pause[verifier]), _CHEAPEST)
            self.pause[verifier] = min(2 * self.pause[verifier], _LONGEST_PAUSE)
        if not self.forward_times.empty:
            drafter_cost = self.forward_times.seconds(size) / times.seconds(size)
        return Prices(verify, worth * drafter_cost * size, size)

    def _extra_cost(self, verifier: int, size: int) -> np.ndarray:
        """[length + 1] steps without drafts that k more tokens per request take in addition."""
        times, kept = self.verifier_times[verifier], self._extra[verifier]
        if kept is not None and kept[0] == size:
            _, observed, extra = kept
            if observed >= _TIMED and times.observed - observed < _STAYS:
                return extra
        plain = times.seconds(size)
        longer = [times.seconds(size * (1 + k)) / plain - 1 for k in range(1, self.length + 1)]
        extra = np.array([0.0, *longer])
        self._extra[verifier] = size, times.observed, extra
        return extra
