"""Whether tokens lean towards what was drafted, or away from it.

Every token has a score, its ratio q / p (see `directions`) less the mean ratio. Given the text
before it the mean of the score is 0 under p, so the sum over tokens is a martingale of known
variance: its standardized value is normal. A sampler that takes drafts too readily gives tokens of
high ratios too often, one that is too strict those of low ones.
"""

from __future__ import annotations

import numpy as np

from vllm_hsd.tools.audit.directions import (
    FAULTS,
    OVER,
    SCORE,
    SHIFTS,
    SPREAD,
    THIRD,
    UNDER,
    VARIANCE,
)
from vllm_hsd.tools.audit.statistics import Check, log_tail

LEANS = "does not lean to"
# Total variation for each drafted place that a run promises to find: an acceptance ratio 1.6 times
# too large is .12 where p and q are .36 apart.
PROMISED = 0.1
# Where the scores vary by less in total, their sum is not nearly normal, and tells little.
_LEAST_VARIANCE = 50.0


def lean_checks(
    setting: str, drafter: str, marks: np.ndarray, labels: np.ndarray, share: float = 1.0
) -> list[Check]:
    """Tests of all drafted places together, and of each.

    Args:
        marks: [n, directions.WIDTH], NaN where q is unknown or nothing was drafted.
        labels: [n] names of the tokens' places.
        share: of the other places, those where something was drafted: only these could lean.
    """
    drafted = ~np.isnan(marks[:, SCORE]) & (labels != "0")
    names = sorted(set(labels[drafted].tolist()), key=lambda name: (len(name), name))
    found = [_check(setting, drafter, "all", marks[drafted], share)] if drafted.any() else []
    if len(names) > 1:
        own = {name: marks[drafted & (labels == name)] for name in names}
        parts = [_check(setting, drafter, name, each, share) for name, each in own.items()]
        # Where little varies there is nothing to test; the line of all tokens says so.
        found += [check for check in parts if check.faults]
    return found


def factors(check: Check, significance: float) -> tuple[float, float]:
    """Nearest factors on the acceptance ratio, above and below 1, that would be found; infinite,
    and NaN, where none would be.
    """

    def nearest(values: tuple[float, ...], moved: np.ndarray, none: float) -> float:
        # Linear between factors; beyond the last finite one nothing is.
        finite = np.minimum((1.0, *values), OVER[-2])
        least, sizes = check.needed(significance, moved[-1]), (0.0, *np.abs(moved))
        return float(np.interp(least, np.maximum.accumulate(sizes), finite, right=none))

    moved = np.array([shift for shift, _ in check.faults])
    _, above, below = np.split(moved, (1, 1 + len(OVER)))
    return nearest(OVER, above, np.inf), nearest(UNDER, below, np.nan)


def enough(check: Check, significance: float) -> bool:
    """Whether every fault of PROMISED total variation or more per drafted place would be found."""
    large = [moved for moved, variation in check.faults if variation >= PROMISED]
    # Nothing can lean further than to the drafter's own distribution.
    return check.parameter < PROMISED or (
        bool(large) and all(abs(each) >= check.needed(significance, each) for each in large)
    )


def _check(setting: str, drafter: str, place: str, marks: np.ndarray, share: float) -> Check:
    count = len(marks)
    hypothesis = f"{LEANS} {drafter}"
    variance = float(marks[:, VARIANCE].sum())
    variation = marks[:, SHIFTS + FAULTS :].mean(0)
    apart = float(variation[0])
    if variance < _LEAST_VARIANCE:
        return Check(setting, hypothesis, drafter, place, count, 1.0, 0.0, "score", apart)
    moved = marks[:, SHIFTS : SHIFTS + FAULTS].sum(0) * share
    total = float(marks[:, SCORE].sum())
    z = total / np.sqrt(variance)
    skewness = float(marks[:, THIRD].sum()) / variance**1.5
    shift = abs(total / moved[0]) * variation[0] if moved[0] else 0.0
    faults = np.stack((moved / np.sqrt(variance), variation), 1)
    growth = max(float(marks[:, SPREAD].sum()) / variance - 1, 0.0) * share
    growth = growth / faults[0, 0] if faults[0, 0] > 0 else 0.0
    p_value = float(min(1.0, np.exp(log_tail(z, skewness))))
    tail = tuple(map(tuple, faults.tolist())), skewness, growth
    place_of = setting, hypothesis, drafter, place, count
    return Check(*place_of, p_value, float(shift), "score", apart, *tail)
