"""Tests that generated tokens follow the target, from their randomized quantiles.

The randomized probability integral transform of a token x with probabilities p given its prefix is
u = P(tokens ordered before x) + V p(x), V uniform. If every token follows p given its prefix, all u
of a text are independent and uniform on [0, 1), whatever the prefixes are.

That stays true for the tokens that a *predictable* rule picks: one that looks at earlier tokens and
at whether the current step goes on, but not at the token itself. The place of a token within its
engine step is such a rule, under token-level rejection and under block verification: given that at
least t draft tokens are accepted, and which ones, the token after them follows p. (How a step ends
is not: a token picked because it was the last of its step is not uniform.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import optimize, stats

# Probability that a lossless engine fails one run.
ERROR_PROBABILITY = 1e-4
# Probability with which a shift of the size called detectable is found.
POWER = 0.99
# Orders of the vocabulary: an error may be invisible in one of them.
ORDERS = ("token id", "falling probability")

# Fewer tokens at a place are counted with the place before it.
_FEWEST = 500
# Fewer tokens at place 0, the first ones of answers, are not tested by themselves.
_FEWEST_FIRST = 100
# Expected count of a cell of a chi-square test, at least.
_PER_CELL = 20
_MOST_BINS = 10


@dataclass(frozen=True)
class Tokens:
    """The scored tokens of one sampling setting, answer after answer.

    Attributes:
        quantiles: [2, n] float64 randomized quantiles, one row for each of ORDERS.
        first: [n] bool, the first token of an answer.
        place: [n] int64, 1 for the first token of an engine step, 2 for the next one, ...; 0 for
            the first token of an answer, which no draft precedes.
        after: [n] int64, length of the step before the token's own; 0 in an answer's first two.
    """

    quantiles: np.ndarray
    first: np.ndarray
    place: np.ndarray
    after: np.ndarray


@dataclass(frozen=True)
class Check:
    """One test of one hypothesis.

    Attributes:
        setting: which sampling parameters.
        hypothesis: what a lossless engine fulfils.
        order: one of ORDERS.
        place: which tokens were tested: "all", "1", "2", ..., "5+".
        num_tokens: how many.
        p_value: probability of a deviation as large as this one in a lossless engine.
        shift: estimate of the deviation, in probability (0: none).
        method: "KS" (Kolmogorov-Smirnov), "chi-square" or "Poisson" (a count of rare events).
        parameter: degrees of freedom of chi-square, expected events of Poisson.
    """

    setting: str
    hypothesis: str
    order: str
    place: str
    num_tokens: int
    p_value: float
    shift: float
    method: Literal["KS", "chi-square", "Poisson"] = "KS"
    parameter: float = 0

    def detectable(self, significance: float) -> float:
        """Smallest shift of probability that is found with probability POWER.

        Kolmogorov-Smirnov: mass moved across one quantile. Chi-square: total variation distance
        between the cells, if it is spread evenly. Poisson: share of the events.
        """
        count = self.num_tokens
        if self.method == "KS":
            critical = stats.kstwo.isf(significance, count)
            return float(critical + stats.norm.ppf(POWER) / (2 * np.sqrt(count)))
        if self.method == "Poisson":
            events = stats.poisson.isf(significance, self.parameter) + 1
            return float(stats.gamma.ppf(POWER, events) / count)
        critical = stats.chi2.isf(significance, self.parameter)

        def missed(noncentrality: float) -> float:
            return stats.ncx2.cdf(critical, self.parameter, noncentrality) - (1 - POWER)

        noncentrality = optimize.brentq(missed, 1e-9, 10 * critical + 1000)
        return float(np.sqrt(noncentrality / count) / 2)


def arrange(quantiles: Sequence[np.ndarray], step_lengths: Sequence[Sequence[int]]) -> Tokens:
    """Tokens of several answers with their places in the engine's steps.

    Args:
        quantiles: [2, n_i] of every answer.
        step_lengths: tokens of every step of every answer; they add up to n_i.

    Raises:
        ValueError: they do not add up.
    """
    firsts, places, afters = [], [], []
    for own, lengths in zip(quantiles, step_lengths, strict=True):
        count = own.shape[1]
        if sum(lengths) != count:
            raise ValueError(f"steps of {sum(lengths)} tokens for an answer of {count}.")
        sizes = np.asarray(lengths, dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        place = np.arange(count) - np.repeat(starts, sizes) + 1
        place[: sizes[0]] = 0
        after = np.repeat(np.concatenate(([0], sizes[:-1])), sizes)
        after[: sizes[:2].sum()] = 0
        firsts.append(np.arange(count) == 0)
        places.append(place)
        afters.append(after)
    return Tokens(
        np.concatenate(quantiles, axis=1),
        np.concatenate(firsts),
        np.concatenate(places),
        np.concatenate(afters),
    )


def checks_of(setting: str, tokens: Tokens) -> list[Check]:
    """All tests of one setting: uniform at every place, and independent of what came before."""
    found = []
    labels = _labels(tokens.place)
    names = sorted(set(labels.tolist()), key=lambda name: (len(name), name))
    for order, quantiles in zip(ORDERS, tokens.quantiles, strict=True):
        if len(names) > 1:
            found.append(_uniform(setting, order, "all", quantiles))
        for name in names:
            own = quantiles[labels == name]
            if name != "0" or len(own) >= _FEWEST_FIRST:
                found.append(_uniform(setting, order, name, own))
        previous = np.concatenate(([np.nan], quantiles[:-1]))
        for name in names:
            chosen = (labels == name) & ~tokens.first
            count = int(chosen.sum())
            bins = min(_MOST_BINS, int(np.sqrt(count / _PER_CELL)))
            if bins < 2:
                continue
            rows = _bin(previous[chosen], bins)
            test = _chi_square(rows, quantiles[chosen], bins, bins)
            found.append(Check(setting, "independent of the token before", order, name, *test))
        known = tokens.after > 0
        rows = tokens.after * (tokens.place.max(initial=0) + 1) + tokens.place
        rows, num_rows = _frequent_rows(rows[known], _FEWEST)
        bins = _MOST_BINS
        if num_rows:
            test = _chi_square(rows, quantiles[known], num_rows, bins)
            hypothesis = "independent of the step before"
            found.append(Check(setting, hypothesis, order, "all", *test))
    return found


def rare_event_check(setting: str, hypothesis: str, count: int, trials: int, rate: float) -> Check:
    """Check that an event that rounding causes at most at `rate` is not more frequent."""
    p_value = float(stats.poisson.sf(count - 1, rate * trials)) if count else 1.0
    share = count / trials
    expected = rate * trials
    return Check(setting, hypothesis, ORDERS[1], "all", trials, p_value, share, "Poisson", expected)


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: below alpha where a hypothesis is rejected at alpha in total."""
    values = np.asarray(p_values, dtype=float)
    order = values.argsort(kind="stable")
    factors = len(values) - np.arange(len(values))
    raised = np.minimum(1, np.maximum.accumulate(values[order] * factors))
    result = np.empty(len(values))
    result[order] = raised
    return result.tolist()


def _labels(place: np.ndarray) -> np.ndarray:
    """Names of the places; the last ones share a name until all have enough tokens."""
    counts = np.bincount(place)
    last = len(counts) - 1
    while last > 1 and counts[last:].sum() < _FEWEST:
        last -= 1
    names = np.array([str(i) for i in range(last + 1)], dtype=object)
    if last + 1 < len(counts):
        names[last] += "+"
    return names[np.minimum(place, last)]


def _uniform(setting: str, order: str, place: str, quantiles: np.ndarray) -> Check:
    result = stats.kstest(quantiles, "uniform")
    return Check(
        setting,
        "follows the target",
        order,
        place,
        len(quantiles),
        float(result.pvalue),
        float(result.statistic),
    )


def _bin(quantiles: np.ndarray, bins: int) -> np.ndarray:
    return np.minimum((quantiles * bins).astype(np.int64), bins - 1)


def _frequent_rows(values: np.ndarray, fewest: int) -> tuple[np.ndarray, int]:
    """Values as row numbers; rare ones share a row. No rows where there are too few values."""
    if len(values) < fewest:
        return values, 0
    _, rows, counts = np.unique(values, return_inverse=True, return_counts=True)
    order = (-counts).argsort(kind="stable")
    number = np.empty(len(counts), dtype=np.int64)
    number[order] = np.arange(len(counts))
    num_rows = int((counts >= fewest).sum())
    if counts[counts < fewest].sum() >= fewest or not num_rows:
        num_rows += 1
    return np.minimum(number[rows], num_rows - 1), num_rows


def _chi_square(
    rows: np.ndarray, quantiles: np.ndarray, num_rows: int, bins: int
) -> tuple[int, float, float, Literal["chi-square"], int]:
    """Within each row all bins are equally likely.

    Returns:
        (tokens, p-value, shift, method, degrees of freedom).
    """
    counts = np.zeros((num_rows, bins))
    np.add.at(counts, (rows, _bin(quantiles, bins)), 1)
    expected = np.broadcast_to(counts.sum(1, keepdims=True) / bins, counts.shape)
    used = expected > 0
    statistic = float((((counts - expected) ** 2)[used] / expected[used]).sum())
    freedom = int(used[:, 0].sum()) * (bins - 1)
    count = len(quantiles)
    shift = float(np.sqrt(max(statistic - freedom, 0) / count) / 2)
    return count, float(stats.chi2.sf(statistic, freedom)), shift, "chi-square", freedom
