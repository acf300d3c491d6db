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
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy import optimize, stats

# Probability that a lossless engine fails one run.
ERROR_PROBABILITY = 1e-4
# Probability with which a shift of the size called detectable is found.
POWER = 0.99
# Orders of the vocabulary: an error may be invisible in one of them.
ORDERS = ("token id", "falling probability")
# What is tested; every other hypothesis is named where it is.
FOLLOWS = "follows the target"

LIKELY = "no token is improbable"
# Probabilities that count as improbable.
_IMPROBABLE = (1e-3, 1e-5, 1e-7, 1e-9)

# Fewer tokens at a place are counted with the place before it.
_FEWEST = 500
# Fewer tokens at place 0, the first ones of answers, are not tested by themselves.
_FEWEST_FIRST = 100
# The mean of fewer quantiles than these is not nearly normal.
_FEWEST_IN_ANSWER = 16
# Expected count of a cell of a chi-square test, at least.
_PER_CELL = 20
_MOST_BINS = 10


@dataclass(frozen=True)
class Tokens:
    """The scored tokens of one sampling setting, answer after answer.

    Attributes:
        quantiles: [orders, n] float64 randomized quantiles, one row for each of ORDERS and then
            one for each drafter's order, NaN where that is unknown.
        answer: [n] int64, the number of the token's answer.
        first: [n] bool, the first token of an answer.
        place: [n] int64, 1 for the first token of an engine step, 2 for the next one, ...; 0 for
            the first token of an answer, which no draft precedes.
        after: [n] int64, length of the step before the token's own; 0 in an answer's first two.
    """

    quantiles: np.ndarray
    answer: np.ndarray
    first: np.ndarray
    place: np.ndarray
    after: np.ndarray

    def labels(self) -> np.ndarray:
        """[n] names of the places; the last ones share a name until all have enough tokens."""
        counts = np.bincount(self.place)
        last = len(counts) - 1
        while last > 1 and counts[last:].sum() < _FEWEST:
            last -= 1
        names = np.array([str(i) for i in range(last + 1)], dtype=object)
        if last + 1 < len(counts):
            names[last] += "+"
        return names[np.minimum(self.place, last)]


@dataclass(frozen=True)
class Check:
    """One test of one hypothesis.

    Attributes:
        setting: which sampling parameters.
        hypothesis: what a lossless engine fulfils.
        order: one of ORDERS, or the name of a drafter.
        place: which tokens were tested: "all", "1", "2", ..., "5+".
        num_tokens: how many; of "answers" as many as would show a deviation equally well.
        p_value: probability of a deviation as large as this one in a lossless engine.
        shift: estimate of the deviation, in probability (0: none).
        method: "KS" (Kolmogorov-Smirnov), "chi-square", "Poisson" (a count of rare events),
            "answers" (a mean for every answer) or "score" (see `lean`).
        parameter: degrees of freedom of chi-square and answers, expected events of Poisson, total
            variation between target and drafter of scores.
        faults: for every fault of `directions`, by how many standard deviations it would move the
            score, and its total variation; empty for other methods.
        skewness: of the score.
        growth: of its variance, for each standard deviation by which leaning would move it.
    """

    setting: str
    hypothesis: str
    order: str
    place: str
    num_tokens: int
    p_value: float
    shift: float
    method: Literal["KS", "chi-square", "Poisson", "answers", "score"] = "KS"
    parameter: float = 0
    faults: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    skewness: float = 0
    growth: float = 0

    @property
    def leans(self) -> bool:
        """Whether it tests all drafted places together for leaning to a drafter (see `lean`)."""
        return self.method == "score" and self.place == "all"

    def needed(self, significance: float, moved: float) -> float:
        """See `needed`, of a fault that moves the score by `moved`."""
        # Away from the drafter the tail and the variance get smaller.
        away = moved < 0
        skewness = -self.skewness if away else self.skewness
        return needed(significance, max(skewness, 0.0), 0.0 if away else self.growth)

    def detectable(self, significance: float) -> float:
        """Smallest shift of probability that is found with probability POWER.

        Kolmogorov-Smirnov: mass moved across one quantile. Chi-square: total variation distance
        between the cells, if it is spread evenly. Poisson: share of the events. Answers: the
        standard deviation of the answers' mean quantiles. Score: total variation towards the
        drafter, infinite where not even drawing from the drafter would be found.
        """
        count = self.num_tokens
        if self.method == "score":
            moved, variation = self.faults[0] if self.faults else (0.0, 0.0)
            share = self.needed(significance, moved) / abs(moved) if moved else np.inf
            return float(share * variation) if share <= 1 else np.inf
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
        scale = 1 / 12 if self.method == "answers" else 1 / 4
        return float(np.sqrt(noncentrality * scale / count))


def log_tail(z: float, skewness: float) -> float:
    """Log of the p-value of a score, with the skewness to first order of Cramer's series."""
    skewed = np.clip(skewness * z**3 / 6, 0, z**2 / 4)
    return float(stats.norm.logsf(abs(z)) + np.log(2) + skewed)


def needed(significance: float, skewness: float = 0.0, growth: float = 0.0) -> float:
    """By how many standard deviations a score must move to be found with probability POWER.

    Args:
        skewness, growth: see `Check`.
    """
    missing = np.log(significance)
    z = optimize.brentq(lambda z: log_tail(z, skewness) - missing, 0, 4 * np.sqrt(1 - missing))
    above = stats.norm.ppf(POWER)
    # So far above z that the score exceeds it, whose variance has grown by then.
    middle = z + growth * above**2 / 2
    return float(middle + np.sqrt(middle**2 - z**2 + above**2))


def arrange(quantiles: Sequence[np.ndarray], step_lengths: Sequence[Sequence[int]]) -> Tokens:
    """Tokens of several answers with their places in the engine's steps.

    Args:
        quantiles: [orders, n_i] of every answer.
        step_lengths: tokens of every step of every answer.

    Raises:
        ValueError: these do not add up to n_i.
    """
    columns = []
    for i, (own, lengths) in enumerate(zip(quantiles, step_lengths, strict=True)):
        count = own.shape[1]
        if sum(lengths) != count:
            raise ValueError(f"steps of {sum(lengths)} tokens for an answer of {count}.")
        sizes = np.asarray(lengths, dtype=np.int64)
        number = np.arange(count)
        place = number - np.repeat(np.cumsum(sizes) - sizes, sizes) + 1
        place[: sizes[0]] = 0
        after = np.repeat(np.concatenate(([0], sizes[:-1])), sizes)
        after[: sizes[:2].sum()] = 0
        columns.append((np.full(count, i), number == 0, place, after))
    joined = (np.concatenate(column) for column in zip(*columns, strict=True))
    return Tokens(np.concatenate(quantiles, axis=1), *joined)


def checks_of(setting: str, tokens: Tokens, drafters: Sequence[str] = ()) -> list[Check]:
    """All tests of one setting: uniform at every place, and independent of what came before.

    In the further orders of `tokens`, the drafters', tokens are tested for being uniform only.
    """
    found = []
    labels = tokens.labels()
    names = sorted(set(labels.tolist()), key=lambda name: (len(name), name))
    for order, quantiles in zip((*ORDERS, *drafters), tokens.quantiles, strict=True):
        known = ~np.isnan(quantiles)
        if len(names) > 1 and known.any():
            found.append(uniform(setting, order, "all", quantiles[known]))
        for name in names:
            own = quantiles[(labels == name) & known]
            if len(own) >= (_FEWEST_FIRST if name == "0" or order in drafters else 1):
                found.append(uniform(setting, order, name, own))
        found += alike(setting, order, quantiles[known], tokens.answer[known])
    for order, quantiles in zip(ORDERS, tokens.quantiles, strict=False):
        previous = np.concatenate(([np.nan], quantiles[:-1]))
        for name in names:
            chosen = (labels == name) & ~tokens.first
            found += _independent(
                setting, "the token before", order, name, previous[chosen], quantiles[chosen]
            )
        lengths = np.bincount(tokens.answer)
        if len(lengths) > 1 and (lengths == lengths[0]).all():
            # Requests in one batch: what one was given is to tell nothing about the next one.
            grid = quantiles.reshape(len(lengths), -1)
            before, own = grid[:-1].ravel(), grid[1:].ravel()
            found += _independent(setting, "the answer before", order, "all", before, own)
        known = tokens.after > 0
        rows = tokens.after * (tokens.place.max(initial=0) + 1) + tokens.place
        rows, num_rows = _frequent_rows(rows[known], _FEWEST)
        if num_rows:
            test = _chi_square(rows, quantiles[known], num_rows, _MOST_BINS)
            found.append(Check(setting, "independent of the step before", order, "all", *test))
    return found


def _independent(
    setting: str, of: str, order: str, place: str, before: np.ndarray, own: np.ndarray
) -> list[Check]:
    bins = min(_MOST_BINS, int(np.sqrt(len(own) / _PER_CELL)))
    if bins < 2:
        return []
    test = _chi_square(_bin(before, bins), own, bins, bins)
    return [Check(setting, f"independent of {of}", order, place, *test)]


def alike(setting: str, order: str, quantiles: np.ndarray, answer: np.ndarray) -> list[Check]:
    """Whether the answers' mean quantiles scatter by no more than chance, a few odd ones too.

    How many an answer has depends on its tokens, so equally many are taken: uniform numbers stand
    for missing ones.
    """
    sizes = np.bincount(answer)
    number = len(sizes)
    if number < 2:
        return []
    length = max(_FEWEST_IN_ANSWER, round(sizes.mean()))
    place = np.arange(len(answer)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    taken, own = place < length, np.minimum(sizes, length)
    count = int((own**2).sum() / length)
    if count < 2 * _FEWEST_IN_ANSWER:
        return []
    sums = np.bincount(answer[taken], quantiles[taken] - 0.5, number)
    drawn = np.repeat(np.arange(number), length - own)
    # A stream of its own: the quantiles were drawn from others.
    rng = np.random.default_rng([number, *b"alike"])
    sums += np.bincount(drawn, rng.random(len(drawn)) - 0.5, number)
    statistic = float((12 * sums**2 / length).sum())
    shift = float(np.sqrt(max(statistic - number, 0) / 12 / count))
    figures = count, float(stats.chi2.sf(statistic, number)), shift
    return [Check(setting, "alike in all answers", order, "all", *figures, "answers", number)]


def rare_event_check(setting: str, hypothesis: str, count: int, trials: int, rate: float) -> Check:
    """Check that an event that rounding causes at most at `rate` is not more frequent."""
    expected = rate * trials
    figures = trials, float(stats.poisson.sf(count - 1, expected)), count / trials
    return Check(setting, hypothesis, ORDERS[1], "all", *figures, "Poisson", expected)


def improbable(setting: str, tails: np.ndarray, exact: bool) -> Check:
    """Check that tokens whose like is improbable are as rare as that, at several thresholds.

    A row of another request, or a token that was forced into another text, shows so wherever the
    model is sure of itself, however seldom it happens.

    Args:
        tails: [n] the probability of all tokens that are no likelier than the text's one: below t
            with probability t at most.
        exact: whether probabilities are those of 32 bits; else rounding may double them.
    """
    count, factor = len(tails), 1 if exact else 2
    found = []
    for bound in _IMPROBABLE:
        seen, expected = int((tails <= bound).sum()), factor * bound * count
        found.append((float(stats.poisson.sf(seen - 1, expected)), seen, expected))
    p, seen, _ = min(found)
    figures = count, min(1.0, p * len(_IMPROBABLE)), seen / max(count, 1)
    # By its strictest threshold a few events are found; of several tests each must find more.
    least = found[-1][-1] * len(_IMPROBABLE)
    return Check(setting, LIKELY, ORDERS[1], "all", *figures, "Poisson", least)


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: below alpha where a hypothesis is rejected at alpha in total."""
    values = np.array(p_values, dtype=float)
    order = values.argsort(kind="stable")
    factors = len(values) - np.arange(len(values))
    values[order] = np.minimum(1, np.maximum.accumulate(values[order] * factors))
    return values.tolist()


def uniform(setting: str, order: str, place: str, quantiles: np.ndarray) -> Check:
    """Kolmogorov-Smirnov."""
    result = stats.kstest(quantiles, "uniform")
    figures = len(quantiles), float(result.pvalue), float(result.statistic)
    return Check(setting, FOLLOWS, order, place, *figures)


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
    """All bins of a row are equally likely: (tokens, p, shift, method, degrees of freedom)."""
    counts = np.zeros((num_rows, bins))
    np.add.at(counts, (rows, _bin(quantiles, bins)), 1)
    counts = counts[counts.any(1)]
    statistic = float(stats.chisquare(counts, axis=1).statistic.sum())
    freedom = len(counts) * (bins - 1)
    count = len(quantiles)
    shift = float(np.sqrt(max(statistic - freedom, 0) / count) / 2)
    return count, float(stats.chi2.sf(statistic, freedom)), shift, "chi-square", freedom
