"""Seconds of a forward pass as a function of its tokens, learned while serving."""

from __future__ import annotations

import numpy as np

# One residual moves an estimate by a factor of at most e^0.3: a stalled step is an outlier.
_MOST_LOG_RESIDUAL = 0.3
# Weights of a new observation once an estimate is settled: in the speed of the whole machine, and
# in what is particular to a size. A lasting shift is followed in 20 observations.
_MACHINE_RATE, _SIZE_RATE = 0.08, 0.02
# Observations of a size from which on a residual is the machine's.
_SETTLED = 3
# Observations at other sizes after which what a size has seen weighs half.
_HALF_LIFE = 200.0
# Observations after which a size that only a seed knows is forgotten.
_SEED_LIFE = 32


class StepTimes:
    """A curve through the times seen at a few token counts; bounded memory, O(sizes) per call.

    The sizes lie on a grid with steps of at most 1.5. Log seconds are the sum of one number for the
    machine, which others may slow down for a while, and one for each size; both are exponentially
    forgotten means, residuals clipped. A size that has not been met for long learns anew at once.

    Args:
        max_tokens: largest number of tokens that is told apart.
    """

    def __init__(self, max_tokens: int = 1 << 16) -> None:
        grid = [1, 2, 3]
        while grid[-1] < max_tokens:
            grid.append(2 * grid[-2])
        self.sizes = np.array(grid, dtype=np.float64)
        self.log_sizes = np.log(self.sizes)
        self.machine = 0.0
        self.log_seconds = np.full(len(grid), np.nan)
        self.weight = np.zeros(len(grid))
        self.last_seen = np.zeros(len(grid), dtype=np.int64)
        self.observed = 0
        # What `seconds` reads: which sizes are known, and the rising curve through them.
        self._curve: tuple[np.ndarray, np.ndarray] | None = None

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in one forward pass over `tokens` tokens that took `seconds`."""
        if tokens < 1 or not 0 < seconds < np.inf:
            return
        self.observed += 1
        self._curve = None
        if self.observed == _SEED_LIFE:
            # A seed of another machine would stay wrong at sizes that are avoided because of it.
            unmet = self.last_seen == 0
            self.weight[unmet], self.log_seconds[unmet] = 0, np.nan
        size = self._nearest(tokens)
        log_seconds = float(np.log(seconds)) - self.machine
        age = self.observed - self.last_seen[size]
        self.last_seen[size] = self.observed
        known = self.weight > 0
        if not known[size]:
            # To the grid's own size by the slope of those that are known.
            if known.any():
                curve = self.log_seconds[known]
                own, there = self._along(curve, known, np.array([self.sizes[size], tokens]))
                log_seconds += own - there
            self.log_seconds[size] = log_seconds
            self.weight[size] = 1
            return
        residual = log_seconds - float(self._along(self.log_seconds[known], known, tokens))
        self.weight[size] *= 0.5 ** (age / _HALF_LIFE)
        settled = self.weight[size] >= _SETTLED
        if settled:
            residual = min(max(residual, -_MOST_LOG_RESIDUAL), _MOST_LOG_RESIDUAL)
            self.machine += _MACHINE_RATE * residual
        self.weight[size] += 1
        self.log_seconds[size] += residual * max(1 / self.weight[size], _SIZE_RATE)

    def seed(self, tokens: np.ndarray, seconds: np.ndarray) -> None:
        """Start from times measured before; a size weighs as one observation.

        Args:
            tokens: [n] of each pass, at least 1.
            seconds: [n] above 0; those of equally many tokens are averaged.
        """
        counts, place = np.unique(tokens, return_inverse=True)
        means = np.bincount(place, np.log(seconds)) / np.bincount(place)
        sizes = [self._nearest(count) for count in counts]
        self.log_seconds[sizes] = np.interp(self.log_sizes[sizes], np.log(counts), means)
        self.weight[sizes] = 1
        self._curve = None

    def knows(self, tokens: int) -> bool:
        """Whether a pass of about this many tokens has been seen."""
        return bool(self.weight[self._nearest(tokens)])

    def age(self, tokens: int) -> float:
        """Passes of other sizes since one of about this many tokens; infinite before the first."""
        size = self._nearest(tokens)
        return self.observed - self.last_seen[size] if self.weight[size] else np.inf

    @property
    def empty(self) -> bool:
        """Whether nothing has been seen."""
        return not self.weight.any()

    def seconds(self, tokens: np.ndarray | float) -> np.ndarray:
        """Seconds of passes over `tokens` tokens (any shape), never falling with more tokens.

        Between known sizes along a line in logarithms; above the largest along the line through the
        last two (a size that turns out slower is known after one pass); below the smallest one as
        long as that.

        Raises:
            ValueError: nothing has been seen.
        """
        if self.empty:
            raise ValueError("No forward pass has been seen.")
        if self._curve is None:
            known = self.weight > 0
            self._curve = known, self._rising(known)
        known, curve = self._curve
        return np.exp(self.machine + self._along(curve, known, tokens))

    def _along(
        self, curve: np.ndarray, known: np.ndarray, tokens: np.ndarray | float
    ) -> np.ndarray:
        """Log seconds by a curve through the known sizes, without the machine's part."""
        sizes = self.sizes[known]
        inside = np.interp(np.log(np.maximum(tokens, 1)), self.log_sizes[known], curve)
        if len(sizes) == 1:
            return inside
        low, high = np.exp(curve[-2:])
        slope = min(max((high - low) / (sizes[-1] - sizes[-2]), 0.0), high / sizes[-1])
        return inside + np.log1p(np.maximum(tokens - sizes[-1], 0) * slope / high)

    def _rising(self, known: np.ndarray) -> np.ndarray:
        """Log seconds of the known sizes, pooled where they would fall (isotonic regression)."""
        curve = self.log_seconds[known]
        if np.all(curve[1:] >= curve[:-1]):
            return curve
        age = self.observed - self.last_seen[known]
        pools: list[list[float]] = []
        for value, weight in zip(
            curve, self.weight[known] * 0.5 ** (age / _HALF_LIFE), strict=True
        ):
            pools.append([value, max(weight, 1e-9), 1])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                above, below = pools.pop(), pools.pop()
                total = above[1] + below[1]
                mean = (above[0] * above[1] + below[0] * below[1]) / total
                pools.append([mean, total, above[2] + below[2]])
        return np.repeat([pool[0] for pool in pools], [int(pool[2]) for pool in pools])

    def _nearest(self, tokens: float) -> int:
        return int(np.abs(self.log_sizes - np.log(max(tokens, 1))).argmin())
