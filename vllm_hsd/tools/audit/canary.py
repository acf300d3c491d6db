"""A test of served tokens that may be looked at after every answer, for as long as a server runs.

Bets against the hypothesis that every token follows the target: each multiplies its wealth by a
factor whose mean is at most 1 if that holds, so the mean wealth of all bets exceeds 1 / a with
probability a at most, ever (Ville's inequality). 1 / the largest mean wealth so far is a p-value at
any time, whenever one stops. What is kept of the past does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from vllm_hsd.tools.audit.quantiles import TAIL, randomized

_BINS = 10
# Pseudo-tokens of every bin, of the distribution that is bet on.
_PRIOR = 2.0
# Tails that are bet on.
_TAILS = (1e-2, 1e-4, 1e-6, 1e-8)
# Of tokens outside the filters, the rate that is bet on, as a multiple of what rounding causes.
_EXCLUDED = 10.0
# By how much rounding may raise the probability of a bin or of a tail, and the rate of tokens that
# it moves across the border of a filter, by dtype; else 16 bits.
_ROUNDING = {"float32": (1e-5, 1e-5)}
_ROUNDING_16_BIT = (2e-3, 1e-2)


@dataclass
class Canary:
    """Wealth and past of all bets.

    Attributes:
        dtype: of the served model.
        model, url: what is served, and where.
        counts: [orders, places, _BINS] quantiles seen: orders as in `statistics.ORDERS`, places
            all, first of a step, later in a step.
        wealth: logarithm of each bet's wealth: one for each row of `counts`, then improbable
            tokens, then tokens outside the filters.
        highest: logarithm of the largest mean wealth.
    """

    dtype: str
    model: str = ""
    url: str = ""
    tokens: int = 0
    answers: int = 0
    highest: float = 0.0
    counts: list = field(default_factory=lambda: np.zeros((2, 3, _BINS)).tolist())
    wealth: list[float] = field(default_factory=lambda: [0.0] * 8)

    @property
    def p_value(self) -> float:
        """Anytime-valid."""
        return math.exp(-max(self.highest, 0.0))

    def observe(
        self, ranges: np.ndarray, step_lengths: Sequence[int], rng: np.random.Generator
    ) -> None:
        """Bet on the tokens of one answer.

        Args:
            ranges: [tokens, quantiles.FIGURES].
            step_lengths: tokens of its steps.
        """
        drift, rate = _ROUNDING.get(self.dtype, _ROUNDING_16_BIT)
        ends = np.cumsum(step_lengths)
        later = ~np.isin(np.arange(len(ranges)), np.concatenate(([0], ends[:-1])))
        quantiles = randomized(ranges[:, :TAIL], rng.random((2, len(ranges))))
        excluded = ranges[:, 0] == 0
        # These have no place; what is left is to stay uniform.
        quantiles[:, excluded] = rng.random((2, int(excluded.sum())))
        bins = np.minimum((quantiles * _BINS).astype(int), _BINS - 1)
        counts, wealth = np.array(self.counts), np.array(self.wealth)
        for i in range(len(ranges)):
            for row in range(6):
                order, place = divmod(row, 3)
                if place in (0, 1 + later[i]):
                    own = counts[order, place]
                    share = (own[bins[order, i]] + _PRIOR) / (own.sum() + _PRIOR * _BINS)
                    wealth[row] += math.log(share * _BINS / (1 + drift))
                    own[bins[order, i]] += 1
            if not excluded[i]:
                paid = sum(1 / bound for bound in _TAILS if ranges[i, TAIL] <= bound)
                wealth[6] += math.log((0.999 + 0.001 * paid / len(_TAILS)) / (1 + drift))
            wealth[7] += math.log(_EXCLUDED if excluded[i] else (1 - _EXCLUDED * rate) / (1 - rate))
            self.highest = max(self.highest, _log_mean(wealth))
        self.counts, self.wealth = counts.tolist(), wealth.tolist()
        self.tokens += len(ranges)
        self.answers += 1

    def document(self) -> dict[str, Any]:
        """For a file, from which `Canary(**document)` goes on."""
        return asdict(self)


def _log_mean(wealth: np.ndarray) -> float:
    highest = float(wealth.max())
    return highest + math.log(np.exp(wealth - highest).mean())
