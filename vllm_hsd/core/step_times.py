"""Seconds of a forward pass as a function of its tokens, learned while serving."""

from __future__ import annotations

import numpy as np

# One residual moves an estimate by a factor of at most e^0.3: a stalled step is an outlier.
_MOST_LOG_RESIDUAL = 0.3
# Weight of a new observation once an estimate is settled: a lasting shift is followed in 20.
_RATE = 0.1
# Observations at other sizes after which what a size has seen weighs half.
_HALF_LIFE = 200.0


class StepTimes:
    """A curve through the times seen at a few token counts; bounded memory, O(sizes) per call.

    The sizes lie on a grid with steps of at most 1.5. Each holds an exponentially forgotten mean of
    log seconds, its residuals clipped. A size that has not been met for long learns anew at once.

    Args:
        max_tokens: largest number of tokens that is told apart.
    """

    def __init__(self, max_tokens: int) -> None:
        grid = [1, 2, 3]
        while grid[-1] < max_tokens:
            grid.append(2 * grid[-2])
        self.sizes = np.array(grid, dtype=np.float64)
        self.log_seconds = np.full(len(grid), np.nan)
        self.weight = np.zeros(len(grid))
        self.last_seen = np.zeros(len(grid), dtype=np.int64)
        self.observed = 0

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in one forward pass over `tokens` tokens that took `seconds`."""
        if tokens < 1 or not 0 < seconds < np.inf:
            return
        self.observed += 1
        size = self._nearest(tokens)
        log_seconds = float(np.log(seconds))
        age = self.observed - self.last_seen[size]
        self.last_seen[size] = self.observed
        if not self.weight[size]:
            # To the grid's own size by the slope of those that are known.
            if self.weight.any():
                log_seconds += self._log(self.sizes[size]) - self._log(tokens)
            self.log_seconds[size] = log_seconds
            self.weight[size] = 1
            return
        residual = log_seconds - self._log(tokens)
        self.weight[size] *= 0.5 ** (age / _HALF_LIFE)
        if self.weight[size] >= 3:
            residual = np.clip(residual, -_MOST_LOG_RESIDUAL, _MOST_LOG_RESIDUAL)
        self.weight[size] += 1
        self.log_seconds[size] += residual * max(1 / self.weight[size], _RATE)

    def knows(self, tokens: int) -> bool:
        """Whether a pass of about this many tokens has been seen."""
        return bool(self.weight[self._nearest(tokens)])

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
        return np.exp(self._log(tokens))

    def _nearest(self, tokens: float) -> int:
        return int(np.abs(np.log(self.sizes) - np.log(max(tokens, 1))).argmin())

    def _log(self, tokens: np.ndarray | float) -> np.ndarray:
        known = self.weight > 0
        sizes, curve = self.sizes[known], np.maximum.accumulate(self.log_seconds[known])
        inside = np.interp(np.log(np.maximum(tokens, 1)), np.log(sizes), curve)
        if len(sizes) == 1:
            return inside
        low, high = np.exp(curve[-2:])
        slope = min((high - low) / (sizes[-1] - sizes[-2]), high / sizes[-1])
        return inside + np.log1p(np.maximum(tokens - sizes[-1], 0) * slope / high)
