"""What to draft: survival against price.

A token is drafted if its probability to survive (that it and all before it are accepted), times
what a token is worth at the goodput reached, pays for what it adds to the step. In the long run the
goodput is largest if every token is drafted that pays, and none other (a renewal reward process).
The one rule gives the source, the draft length of every request, whether a pass of a model pays,
which levels take part, and whether to draft at all.

What keeps it lossless: whether a token is drawn is settled before it is. The rule reads texts,
offers, which are functions of texts, what became of past drafts, times, and the confidence of
tokens that stay in the draft; never a token that is then dropped, nor a uniform that is still to be
used. So each token is drawn from the distribution that it is verified with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_hsd.budget.acceptance import MEMORY, PLACES, PRIOR_ACCEPTANCE, AcceptanceEstimates
from vllm_hsd.budget.step_times import StepTimes
from vllm_hsd.budget.trials import FIRST_PAUSE, LONGEST_PAUSE, Searches, Trials
from vllm_hsd.cascade.level import LookupResult, Sources, StepLevels
from vllm_hsd.cascade.rounds import Round

# Margin against the winner's curse: the best of several noisy estimates is biased upwards.
_MARGIN = 1.1
# A price that nothing pays.
FORBIDDEN = 1e9


@dataclass
class Prices:
    """What drafting costs in one step, in accepted tokens, and what is selected at these prices.

    The ranks of a tensor-parallel target have clocks that differ, and must agree on one's.

    Attributes:
        verify: by verifier (the levels, then the target) [M + 1] float64, that it reads m more
            tokens of all requests together; never falling. The entry of level 0 is not read.
        forward: by verifier, a pass of the lowest level's model for all requests.
        selection: levels and draft lengths; None for all that are configured.
    """

    verify: list[np.ndarray]
    forward: list[float]
    selection: StepLevels | None = None


class DraftBudget:
    """Decides what is drafted, for one cascade; learns from its rounds and passes.

    Args:
        sources: of the lowest level; None where it drafts by given lengths.
        draft_lengths: most tokens per level, cheapest first.
        num_slots: requests at the same time.
        whole: level 0 is a lookup, whose drafts take their time whatever their length.
        rows: most drafts of a request that the target verifies together, without `sources`.
        passed_on: most tokens per level for the level above; `draft_lengths` are for the target.

    Attributes:
        times: seconds by tokens of a pass of every level, and last of the target's step, which is
            reported by what runs it. Those of level 0 are of a whole draft by requests if it has
            lookups.
        pass_times: seconds of a pass of the lowest level's model by tokens.
        acceptance: rows for the sources, then for the pairs of a level and its verifier.
    """

    def __init__(
        self,
        sources: Sources | None,
        draft_lengths: Sequence[int],
        num_slots: int,
        whole: bool = False,
        rows: int = 1,
        passed_on: Sequence[int] = (),
    ) -> None:
        self.passed_on = list(passed_on or draft_lengths)
        self.sources, self.lengths = sources, list(draft_lengths)
        self.target = len(self.lengths)
        self.longest = max(self.lengths)
        # Most tokens of a request that a verifier reads beside its last one.
        self.widest = (sources.branches if sources is not None else rows) * (self.longest + 1)
        self.times = [StepTimes() for _ in range(self.target + 1)]
        self.whole = whole or (sources is not None and bool(sources.lookups))
        self.pass_times = StepTimes() if self.whole else self.times[0]
        # Sources right below the target decide token by token: there is nothing else to select.
        self.selects = sources is None or self.target > 1
        count = 0 if sources is None else len(sources.names)
        pairs = [(low, high) for high in range(1, self.target + 1) for low in range(high)]
        self.rows = {pair: count + i for i, pair in enumerate(pairs)}
        self.acceptance = AcceptanceEstimates(count + len(pairs), num_slots)
        self.trials = Trials(count + len(pairs))
        # Of lookups right below the target, and what those of the step under way gain.
        self.searches, self.gained = Searches(), 0.0
        # By verifier and batch size, exponentially forgotten: tokens emitted per request, and time
        # in steps without drafts.
        shape = self.target + 1, len(self.times[0].sizes)
        self.emitted, self.spent = np.ones(shape), np.ones(shape)
        self.free = Prices(
            [np.zeros(num_slots * self.widest + 1)] * (self.target + 1),
            [0.0] * (self.target + 1),
        )
        self.step = self.free
        # By batch size, how often in a row its time without drafts was found to be old.
        self.unmeasured: dict[int, int] = {}
        # Requests of the target's step under way, and seconds of drafting for it.
        self.waiting, self.drafting_seconds = np.zeros(num_slots, dtype=bool), 0.0
        # Tokens of their branches, that are verified beside the drafts.
        self.beside = np.zeros(num_slots, dtype=np.int64)

    def forget(self, slot: int) -> None:
        """See `Cascade.forget`."""
        self.acceptance.forget(slot)
        self.waiting[slot] = False

    def prices(
        self,
        slots: np.ndarray,
        most: np.ndarray,
        adaptive: bool,
        running: int = 0,
        offer: LookupResult | None = None,
        late: Sequence[float] = (),
    ) -> Prices:
        """Prices of the next step, from the times seen so far.

        Args:
            slots, most: [n] int64 requests that may draft, and how many tokens.
            adaptive: also select the levels, and the draft length of every request at them.
            running: requests of the step, if more than n.
            offer: what the lookup of level 0 has found for these requests.
            late: by level, a step's share of the seconds in which it reads what it has missed.
        """
        size = len(slots)
        if not size or self.times[self.target].empty:
            # Nothing is known yet.
            return Prices(self.free.verify, self.free.forward)
        running = max(size, running)
        found = [self._prices_of(verifier, size, size) for verifier in range(1, self.target)]
        found.append(self._prices_of(self.target, size, running))
        verify = [found[0][0], *(price for price, _ in found)]
        forward = [found[0][1], *(price for _, price in found)]
        if not adaptive:
            return Prices(verify, forward)
        if not self.selects:
            searching = self.searches.due(self.times[0].nearest(size))
            return Prices(verify, forward, None if searching else StepLevels())
        rate = self._rate(self.target, running)
        return Prices(verify, forward, self._select(slots, most, verify[-1], rate, offer, late))

    def _prices_of(self, verifier: int, drafting: int, size: int) -> tuple[np.ndarray, float]:
        """See `Prices`, for a verifier of `size` requests, of which some draft."""
        times, more = self.times[verifier], np.arange(drafting * self.widest + 1)
        if times.empty:
            return 0.0 * more, 0.0
        if verifier == self.target and self._wants_plain_step(times, size):
            # Everything is measured against the time without drafts.
            return FORBIDDEN * more, FORBIDDEN
        rate = self._rate(verifier, size)
        seconds = times.seconds(size + more)
        # Unknown passes are free until one was timed.
        known = not self.pass_times.empty
        forward = rate * self.pass_times.seconds(drafting) if known else 0.0
        return rate * (seconds - seconds[0]), forward

    def _wants_plain_step(self, times: StepTimes, size: int) -> bool:
        """Whether the time of `size` requests without drafts is old, and is measured now.

        Not the first time it is found to be: a size may last for a step only, and that one may
        hold a prompt, whose time says nothing. In vain, it is asked for ever more seldom.
        """
        at = times.nearest(size)
        if times.age(size) <= self._longest_age(size):
            self.unmeasured.pop(at, None)
            return False
        self.unmeasured[at] = count = self.unmeasured.get(at, 0) + 1
        return count > 1 and count.bit_count() == 1

    def _at(self, verifier: int, size: int) -> tuple[int, int]:
        """Where `emitted` and `spent` have the goodput of so many requests."""
        return verifier, self.times[verifier].nearest(size)

    def _longest_age(self, size: int) -> int:
        """Steps after which the time without drafts is old: soon where drafts hardly gain."""
        at = self._at(self.target, size)
        hardly = self.emitted[at] < _MARGIN * self.spent[at]
        return FIRST_PAUSE if hardly else LONGEST_PAUSE

    def _rate(self, verifier: int, size: int) -> float:
        """Tokens per second at the goodput reached, which is at least that without drafts."""
        at = self._at(verifier, size)
        gain = max(self.emitted[at] / self.spent[at], 1.0)
        return float(_MARGIN * gain * size / self.times[verifier].seconds(size))

    def _select(
        self,
        slots: np.ndarray,
        most: np.ndarray,
        verify: np.ndarray,
        rate: float,
        offer: LookupResult | None,
        late: Sequence[float],
    ) -> StepLevels:
        """The levels of the next step, and the draft length of every request.

        Every level takes from below what makes its own tokens cheapest ("Fast Inference via
        Hierarchical Speculative Decoding", section 4: a renewal of rounds, each worth its expected
        emitted tokens); the target takes what gains most above its price.
        """
        if verify[-1] >= FORBIDDEN:
            return StepLevels()
        size, target = len(slots), self.target
        feeders, seconds = self._cheapest_paths(size, offer, late or [0.0] * target)
        gains = [
            self._gain(top, slots, most, verify, rate * seconds[top], offer if top == 0 else None)
            for top in range(target)
        ]
        best = max(range(target), key=lambda top: gains[top][0])
        if offer is not None and target == 1:
            price = rate * float(seconds[0][-1])
            self.gained = gains[0][0] + price if gains[0][0] > 0 else 0.0
        if gains[best][0] > 0:
            self.trials.pays(self.rows[best, target])
        for top in range(target):
            used = top == best and gains[best][0] > 0
            option = self.rows[top, target]
            if not used and self.trials.due(option):
                lengths = np.where(
                    self.trials.takes_part(option, size), np.minimum(most, PLACES), 0
                )
                return self._path(top, feeders, lengths)
        if gains[best][0] <= 0:
            return StepLevels()
        return self._path(best, feeders, gains[best][1])

    def _cheapest_paths(
        self, size: int, offer: LookupResult | None, late: Sequence[float]
    ) -> tuple[list[tuple[int, int] | None], list[np.ndarray]]:
        """By level: its feeder with its draft length, and seconds [longest + 1] of n tokens.

        What a lookup offers now is the first round; later ones are what they are in the mean. What
        levels have missed they read once.
        """
        missed = list(late)
        tokens = np.arange(self.longest + 1)
        feeders: list[tuple[int, int] | None] = []
        seconds: list[np.ndarray] = []
        for level in range(self.target):
            alone = self._seconds(level, size)
            best, feeder = alone * (tokens > 0 if level == 0 and self.whole else tokens), None
            for below in range(level):
                row, n = self.rows[below, level], np.arange(1, self.passed_on[below] + 1)
                survival = np.cumprod(self.acceptance.expected(row, len(n)))
                emitted = 1 + self.acceptance.fill(row) * np.cumsum(survival)
                rounds = seconds[below][n] + self._seconds(level, size * (n + 1))
                first = emitted
                if offer is not None and below == 0:
                    sure = self._survival(row, offer, len(n)).mean(0)
                    first = 1 + np.cumsum(sure)
                cheapest = int((rounds / first).argmin())
                later = np.maximum(tokens - first[cheapest], 0) / emitted[cheapest]
                found = rounds[cheapest] * ((tokens > 0) + later)
                pays = found[-1] + missed[below] < best[-1]
                if pays:
                    self.trials.pays(row)
                if pays or self.trials.due(row):
                    best, feeder = found, (below, int(n[cheapest]))
            feeders.append(feeder)
            seconds.append(best)
            if feeder is not None:
                missed[level] += missed[feeder[0]]
        seconds = [own + more * (tokens > 0) for own, more in zip(seconds, missed, strict=True)]
        return feeders, seconds

    def _gain(
        self,
        top: int,
        slots: np.ndarray,
        most: np.ndarray,
        verify: np.ndarray,
        drafting: np.ndarray,
        offer: LookupResult | None,
    ) -> tuple[float, np.ndarray]:
        """What the best drafts of one level gain above their price, and their lengths [n]."""
        row, width = self.rows[top, self.target], self.lengths[top]
        if offer is None:
            survival = np.cumprod(self.acceptance.ahead(row, slots, 0, width), axis=1)
            fill = self.acceptance.fill(row)
        else:
            survival = self._survival(row, offer, width, self.acceptance.scale(row, slots))
            fill = 1.0
        survival = np.where(np.arange(width) < most[:, None], survival, 0.0)
        best = 0.0, np.zeros(len(slots), dtype=np.int64)
        for length in range(1, width + 1):
            least, net = cut(survival[:, :length], verify, 0, fill)
            gain = net - float(drafting[length])
            if gain > best[0]:
                best = gain, (survival[:, :length] >= least).sum(1)
        return best

    def survival(self, slots: np.ndarray, offer: LookupResult) -> np.ndarray:
        """[n, N] of the tokens of a lookup's offers for the target, 0 where there are none."""
        row = self.rows[0, self.target]
        return self._survival(row, offer, self.lengths[0], self.acceptance.scale(row, slots))

    def _survival(
        self, row: int, offer: LookupResult, width: int, scale: np.ndarray | float = 1.0
    ) -> np.ndarray:
        """[n, width] of a lookup's tokens, by its own estimates and what became of such tokens."""
        places = np.arange(width)
        estimates = np.zeros((len(offer.counts), width))
        given = offer.estimates[:, :width]
        estimates[:, : given.shape[1]] = given
        each = self.acceptance.corrected(row, estimates, places) * np.reshape(scale, (-1, 1))
        held = places < offer.counts[:, None]
        found: np.ndarray = np.where(held, np.cumprod(np.minimum(each, 1.0), axis=1), 0.0)
        return found

    def _seconds(self, level: int, tokens: Any) -> Any:
        """Of a level's pass; free until one was timed."""
        times = self.times[level]
        return 0.0 * tokens if times.empty else times.seconds(tokens)

    def _path(
        self, top: int, feeders: list[tuple[int, int] | None], most: np.ndarray
    ) -> StepLevels:
        levels, lengths = [top], [int(most.max())]
        while (feeder := feeders[levels[0]]) is not None:
            levels.insert(0, feeder[0])
            # Sources decide token by token.
            own = feeder[0] == 0 and self.sources is not None
            lengths.insert(0, self.lengths[0] if own else feeder[1])
        if top == 0 and self.sources is not None:
            lengths[0] = self.lengths[0]
        return StepLevels(tuple(levels), tuple(lengths), most)

    def observe(self, finished: Round) -> None:
        """Take in a round."""
        slots, drafts, accepted = finished.slots, finished.drafts, finished.accepted
        counts, requested = drafts.counts[slots], finished.requested
        row = self.rows[finished.level, finished.verifier]
        if requested is not None:
            wanted = requested > 0
            size, filled = int(wanted.sum()), int((wanted & (counts > 0)).sum())
            if self.selects:
                self.acceptance.count(row, filled, size)
            if finished.level == 0 and self.sources is not None and self.whole and size:
                self.searched(size, finished.drafting_seconds)
        if accepted is not None and self.selects:
            width = int(counts.max(initial=0))
            given = drafts.estimate[slots, :width][None]
            estimates = np.where(np.isnan(given), PRIOR_ACCEPTANCE, given)
            expected = self.acceptance.corrected(row, estimates, np.arange(width))
            pair = slice(row, row + 1)
            verdicts = counts[None], accepted[None]
            self.acceptance.observe(pair, slots, estimates, expected, *verdicts)
        if finished.verifier < self.target:
            assert accepted is not None
            self.times[finished.verifier].observe(finished.computed, finished.verifying_seconds)
            emitted, seconds = int((accepted + 1).sum()), finished.drafting_seconds
            self._learn_goodput(finished.verifier, len(slots), counts, emitted, seconds)
        elif requested is not None:
            self.waiting[slots], self.drafting_seconds = True, finished.drafting_seconds
            if not counts.any():
                # Without drafts there is nothing to verify: the round ends here.
                self._target_verified(slots, counts, np.zeros_like(counts))
        elif accepted is not None:
            self._target_verified(slots, counts, accepted)

    def searched(self, size: int, seconds: float) -> None:
        """Take in a search of lookups, and of those right below the target what it gained."""
        self.times[0].observe(size, seconds)
        drafter = None if self.sources is None else self.sources.drafter
        if drafter is None and self.target == 1 and not self.times[1].empty:
            cost = self._rate(1, size) * self.times[0].seconds(size)
            self.searches.observe(self.times[0].nearest(size), self.gained, cost)

    def followed(self, more: np.ndarray) -> None:
        """Take in [n] int64 tokens that n requests got from the target along branches."""
        at = self._at(self.target, len(more))
        self.emitted[at] += more.sum() / max(len(more), 1)

    def _target_verified(self, slots: np.ndarray, counts: np.ndarray, accepted: np.ndarray) -> None:
        own = self.waiting[slots]
        self.waiting[slots] = False
        emitted, size = int((accepted[own] + 1).sum()), int(own.sum())
        passed = counts[own] + self.beside[slots[own]]
        self._learn_goodput(self.target, size, passed, emitted, self.drafting_seconds)

    def _learn_goodput(
        self, verifier: int, size: int, counts: np.ndarray, emitted: int, seconds: float
    ) -> None:
        """Take in the tokens that one round emitted for `size` requests, and its time."""
        times = self.times[verifier]
        if not size or times.empty:
            return
        plain, verified = times.seconds(size), times.seconds(size + int(counts.sum()))
        at = self._at(verifier, size)
        self.emitted[at] = MEMORY * self.emitted[at] + emitted / size
        self.spent[at] = MEMORY * self.spent[at] + (verified + seconds) / plain


def cut(
    survival: np.ndarray, verify: np.ndarray, placed: int, fill: float = 1.0
) -> tuple[float, float]:
    """The least survival that pays for a token, and what all such tokens gain above their price.

    Survival never rises along a draft, so what is kept of it is a draft; the same holds for trees.

    Args:
        survival: of all tokens of all requests, any shape; 0 for none.
        verify: see `Prices`.
        placed: tokens that are drafted already.
        fill: share of the drafts that will hold any token.

    Returns:
        (infinity where no token pays, what is gained).
    """
    gains = -np.sort(-survival[survival > 0])
    if not len(gains):
        return np.inf, 0.0
    more = (fill * np.arange(1, len(gains) + 1)).astype(np.int64) + placed
    last = len(verify) - 1
    price = verify[np.minimum(more, last)] - verify[min(placed, last)]
    net = fill * np.cumsum(gains) - price
    best = int(net.argmax())
    return (float(gains[best]), float(net[best])) if net[best] > 0 else (np.inf, 0.0)
