"""Seconds of a forward pass as a function of its tokens, learned while serving."""

from __future__ import annotations

import math
from bisect import bisect
from itertools import pairwise
from typing import Any, overload

import numpy as np

from vllm_hsd.budget import constants

# Tokens of the passes by which levels are timed before there are requests.
TIMED_AT_START = 1, 1, 64
LEAST_WEIGHT = 1e-9


class StepTimes:
    """A curve through the times seen at a few token counts; bounded memory, O(sizes) per call.

    The sizes lie on a grid with steps of at most 1.5, next to counts that are kept apart. Log
    seconds are the sum of one number for the machine, which others may slow down for a while, and
    one for each size; both are exponentially forgotten means, residuals clipped. A size that has
    not been met for long learns anew at once.

    It is told of every pass, so single numbers go without numpy, whose calls cost microseconds each
    once a model has emptied the caches.

    Args:
        max_tokens: largest number of tokens that is told apart.

    Attributes:
        observed, largest: passes, and most tokens of one.
    """

    def __init__(self, max_tokens: int = 1 << 16) -> None:
        self.sizes = [1, 2, 3]
        while self.sizes[-1] < max_tokens:
            self.sizes.append(2 * self.sizes[-2])
        # A count of tokens belongs to the size that is nearest in logarithms.
        self.bounds = [math.sqrt(a * b) for a, b in pairwise(self.sizes)]
        # Where each size stands on the curve; after the grid, those of `apart`.
        self.places: list[float] = [*self.sizes]
        self.apart: dict[int, int] = {}
        self.machine = 0.0
        self.log_seconds = [math.nan] * len(self.sizes)
        self.weight = [0.0] * len(self.sizes)
        self.last_seen = [0] * len(self.sizes)
        self.known: list[int] = []
        self.observed = self.largest = 0
        # What `seconds` reads: the pooled curve at the known sizes, and sizes with their seconds.
        self._curve: list[float] | None = None
        self._line: tuple[list[float], np.ndarray] | None = None

    def observe(self, tokens: int, seconds: float, apart: bool = False) -> None:
        """Take in one forward pass over `tokens` tokens that took `seconds`.

        Args:
            apart: keep what so many tokens take apart from now on. The price of a first draft is
                its difference to a pass without drafts, and a pass may take longer by a step where
                it fills a tile of a matrix.
        """
        if tokens < 1 or not 0 < seconds < math.inf:
            return
        self.observed, self.largest = self.observed + 1, max(self.largest, tokens)
        self._curve = self._line = None
        if apart and tokens not in self.apart:
            self._keep_apart(tokens)
        size = self._size_of(tokens)
        log_seconds = math.log(seconds) - self.machine
        age = self.observed - self.last_seen[size]
        self.last_seen[size] = self.observed
        if not self.weight[size]:
            weight = 1.0
            if self.known:
                # By the slope of known ones.
                curve = self._own_curve()
                here = self._along(curve, tokens)
                if log_seconds > self._most(curve, tokens) + constants.MOST_LOG_RESIDUAL:
                    # It stalled: the next one says.
                    log_seconds, weight = here, LEAST_WEIGHT
                log_seconds += self._along(curve, self.places[size]) - here
            self.log_seconds[size], self.weight[size] = log_seconds, weight
            known = (i for i, weight in enumerate(self.weight) if weight > 0)
            self.known = sorted(known, key=self.places.__getitem__)
            return
        residual = log_seconds - self._along(self._own_curve(), tokens)
        self.weight[size] *= constants.MEMORY**age
        # Steps stall, none is too fast: what seems too slow is not met again to learn better.
        residual = min(residual, constants.MOST_LOG_RESIDUAL)
        if self.weight[size] >= constants.PRIOR_WEIGHT:
            residual = max(residual, -constants.MOST_LOG_RESIDUAL)
            self.machine += (1 - constants.SHORT_MEMORY) * residual
        elif residual < -constants.NOTICEABLE:
            # The ones before were stalled.
            self.weight[size] = 0.0
        self.weight[size] += 1
        self.log_seconds[size] += residual / self.weight[size]

    def age(self, tokens: int) -> float:
        """Passes of other sizes since one of about this many tokens; infinite before the first."""
        size = self._size_of(tokens)
        return self.observed - self.last_seen[size] if self.weight[size] else math.inf

    @property
    def empty(self) -> bool:
        """Whether nothing has been seen."""
        return not self.known

    @overload
    def seconds(self, tokens: float) -> float: ...
    @overload
    def seconds(self, tokens: np.ndarray) -> np.ndarray: ...
    def seconds(self, tokens: Any) -> Any:
        """Seconds of passes over `tokens` tokens (any shape); a fall with more was seen often.

        Between known sizes along a line; above the largest along the line through the
        last two (a size that turns out slower is known after one pass); below the smallest one as
        long as that.

        Raises:
            ValueError: nothing has been seen.
        """
        if self.empty:
            raise ValueError("No forward pass has been seen.")
        if self._curve is None:
            self._curve = self._pooled()
        if not isinstance(tokens, np.ndarray):
            return math.exp(self.machine + self._along(self._curve, tokens))
        if self._line is None:
            sizes = [*(self.places[size] for size in self.known), self.sizes[-1]]
            line = [*self._curve, self._along(self._curve, sizes[-1])]
            self._line = sizes, np.exp(line)
        return math.exp(self.machine) * np.interp(tokens, *self._line)

    def _own_curve(self) -> list[float]:
        return [self.log_seconds[size] for size in self.known]

    def _along(self, curve: list[float], tokens: float) -> float:
        """Log seconds by a curve through the known sizes, without the machine's part."""
        known, last = self.known, self.places[self.known[-1]]
        if tokens <= self.places[known[0]] or len(known) == 1:
            return curve[0]
        if tokens > last:
            low, high = math.exp(curve[-2]), math.exp(curve[-1])
            slope = min(max((high - low) / (last - self.places[known[-2]]), 0.0), high / last)
            return curve[-1] + math.log1p((tokens - last) * slope / high)
        right = bisect(known, tokens, 1, len(known) - 1, key=self.places.__getitem__)
        start = self.places[known[right - 1]]
        share = (tokens - start) / (self.places[known[right]] - start)
        low, high = curve[right - 1], curve[right]
        return low + math.log1p(share * math.expm1(high - low))

    def _most(self, curve: list[float], tokens: float) -> float:
        """Log seconds of a pass at most: as a larger one, or as smaller ones one after another."""
        places = [self.places[size] for size in self.known]
        right = bisect(places, tokens)
        most = curve[right] if right < len(places) else math.inf
        if right:
            most = min(most, curve[right - 1] + math.log(tokens / places[right - 1]))
        return most

    def _pooled(self) -> list[float]:
        """Log seconds of the known sizes, without falls by noise (isotonic regression)."""
        curve = self._own_curve()
        if all(low <= high for low, high in pairwise(curve)):
            return curve
        pools: list[tuple[float, float, int]] = []
        first, before, known_well = 0, math.inf, False
        for size, value in zip(self.known, curve, strict=True):
            age = self.observed - self.last_seen[size]
            weight = self.weight[size] * constants.MEMORY**age
            settled = weight >= constants.PRIOR_WEIGHT
            if settled and known_well and before - value > constants.NOTICEABLE:
                first = len(pools)
            before, known_well = value, settled
            pools.append((value, max(weight, LEAST_WEIGHT), 1))
            while len(pools) > first + 1 and pools[-2][0] > pools[-1][0]:
                above, below = pools.pop(), pools.pop()
                total = above[1] + below[1]
                mean = (above[0] * above[1] + below[0] * below[1]) / total
                pools.append((mean, total, above[2] + below[2]))
        return [value for value, _, count in pools for _ in range(count)]

    def _keep_apart(self, tokens: int) -> None:
        self.apart[tokens] = len(self.places)
        if tokens in self.sizes:
            # What is left of this size are passes over more.
            self.places[self.sizes.index(tokens)] += 0.5
        self.places.append(tokens)
        self.log_seconds.append(math.nan)
        self.weight.append(0.0)
        self.last_seen.append(0)

    def _size_of(self, tokens: int) -> int:
        return self.apart.get(tokens, self.nearest(tokens))

    def nearest(self, tokens: float) -> int:
        """Which size of the grid stands for so many tokens."""
        return bisect(self.bounds, tokens)
