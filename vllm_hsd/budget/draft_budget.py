"""What to draft: survival against price.

A token is drafted if its probability to survive (that it and all before it are accepted), times
what a token is worth at the goodput reached, pays for what it adds to the step. In the long run the
goodput is largest if every token is drafted that pays, and none other (a renewal reward process).
The one rule gives the draft length of every request, which levels take part, and whether to draft
at all.

What keeps it lossless: whether a token is drawn is settled before it is. The rule reads texts,
offers of lookups, which are functions of texts, what became of past drafts, and times; never a
token that is drawn in this step, nor a uniform that is still to be used. So each token is drawn
from the distribution that it is verified with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from vllm_hsd.budget.acceptance import AcceptanceEstimates
from vllm_hsd.budget.constants import PLACES, PRIOR_ACCEPTANCE, SHORT_MEMORY
from vllm_hsd.budget.goodput import FORBIDDEN, Goodput
from vllm_hsd.budget.prices import Plan, Round, cut, further_tokens
from vllm_hsd.budget.reading import Reading
from vllm_hsd.budget.step_times import StepTimes
from vllm_hsd.budget.trials import Searches, Trials
from vllm_hsd.cascade.level import DraftingLevel, LookupResult, StepLevels


class Feeder(NamedTuple):
    """What drafts for a level: its number, tokens of its draft, and of a round in the mean."""

    level: int
    tokens: int
    emitted: float


class DraftBudget:
    """Decides what is drafted, for one cascade; learns from its rounds and passes.

    Args:
        levels: cheapest first.
        num_slots: requests at the same time.
        rows: most drafts of a request that the target verifies together.

    Attributes:
        everything: the levels and draft lengths of the longest path.
        times: seconds of the levels' passes by tokens, and last of the target's steps, which are
            reported by what runs them; of a lookup at level 0, seconds of its searches by requests.
        acceptance: a drafter for each pair of a level and its verifier.
    """

    def __init__(self, levels: Sequence[DraftingLevel], num_slots: int, rows: int = 1) -> None:
        self.levels, self.target = list(levels), len(levels)
        path = range(max(k for k, level in enumerate(levels) if not level.verifies), self.target)
        self.everything = StepLevels(tuple(path), tuple(levels[k].passed_on for k in path))
        self.longest = max(level.longest for level in levels)
        # Of the levels that verify, and last of the target.
        self.goodput = [Goodput(rows * (self.longest + 1)) for _ in range(self.target)]
        self.times = [StepTimes(), *(each.times for each in self.goodput)]
        pairs = [(k, v) for k in range(self.target) for v in range(k + 1, self.target + 1)]
        self.rows = {pair: row for row, pair in enumerate(pairs)}
        self.acceptance = AcceptanceEstimates(len(pairs), num_slots)
        self.trials = Trials(len(pairs))
        self.reading = Reading(self.target, num_slots)
        # Of lookups that draft for the target alone, no model above them.
        self.searches = Searches()
        self.feeds = any(level.verifies for level in levels[1:])
        # Requests of the target's step under way, and seconds of drafting for it.
        self.waiting, self.drafting_seconds = np.zeros(num_slots, dtype=bool), 0.0
        # By level and passes so far, what a further pass gains of each request, exponentially
        # forgotten; and of the proposal under way, its passes and requests.
        self.further = np.zeros((self.target, self.longest + 1))
        self.passes, self.drafting = 0, 1
        # Tokens of their branches, that are verified next to the drafts.
        self.branch_tokens = np.zeros(num_slots, dtype=np.int64)

    def forget(self, slot: int) -> None:
        """The slot has a new request."""
        self.acceptance.forget(slot)
        self.waiting[slot], self.branch_tokens[slot] = False, 0
        self.reading.forget(slot)

    def plan(
        self,
        slots: np.ndarray,
        most: np.ndarray,
        running: int,
        offer: LookupResult | None = None,
        late: np.ndarray | None = None,
        left: np.ndarray | None = None,
    ) -> Plan:
        """What is drafted in the next step, by the times seen so far.

        Args:
            slots, most: [n] int64 requests that may draft, and how many tokens.
            running: requests of the step, n at least.
            offer: what the lookup of level 0 has found for these requests; None where it has not
                searched, and drafts nothing.
            late: [levels, n] seconds in which a level reads what it has missed of a request before
                it drafts; None for nothing.
            left: [n] tokens that the requests may still get; None for one each.
        """
        size, target = len(slots), self.goodput[-1]
        if not size or target.times.empty:
            # Nothing is known yet: one request tells, with all that there is.
            one = np.where(np.arange(size) == 0, most, 0)
            return Plan(FORBIDDEN * np.arange(2), replace(self.everything, most=one))
        late = np.zeros((self.target, size)) if late is None else late
        left = self.reading.left(slots, np.ones(size) if left is None else left)
        return self._select(slots, most, running, target.prices(size, running), offer, late, left)

    def _select(
        self,
        slots: np.ndarray,
        most: np.ndarray,
        running: int,
        verify: np.ndarray,
        offer: LookupResult | None,
        late: np.ndarray,
        left: np.ndarray,
    ) -> Plan:
        """The levels of the next step, and the draft length of every request.

        A further pass of a model has no price in a trial, which is to tell. A trial waits until it
        takes a small share of the time since the last one.

        Every level takes from below what makes its own tokens cheapest ("Fast Inference via
        Hierarchical Speculative Decoding", section 4: a renewal of rounds, each worth its expected
        emitted tokens); the target takes what gains most above its price.
        """
        if verify[1] >= FORBIDDEN:
            return Plan(verify)
        size, target = len(slots), self.target
        # The cheapest level that may draft for the target.
        first = int(offer is None and self.levels[0].looks_up)
        rate, tokens = self.goodput[-1].rate(running), self.goodput[-1].gain(running)
        token = further_tokens(verify[::size] / size)
        feeders, seconds = self._cheapest_paths(slots, running, offer, late / left)

        def gain(top: int, most: np.ndarray) -> tuple[float, np.ndarray, float]:
            most = most * (top >= first)
            return self._gain(top, slots, most, verify, rate * seconds[top], offer)

        gains, costs = [gain(top, most) for top in range(target)], rate * late
        # A step without drafts takes the time of so many tokens of a request, and gives one.
        worth = []
        for net, _, accepted in [*gains, (0.0, most, 0.0)]:
            emitted = 1 + accepted / size
            worth.append(((1 + net / size - tokens) / emitted, emitted))
        reads = self.reading.pays(slots, worth, costs, left)
        for top in range(target):
            if not reads[top].all():
                gains[top] = gain(top, np.where(reads[top], most, 0))
        best = max(range(target), key=lambda top: gains[top][0])
        # Above what would be drafted without the search.
        others = max([0.0, *(net for net, _, _ in gains[1:])])
        offered = gains[0][0] + rate * float(seconds[0][-1]) if gains[0][0] > 0 else 0.0
        searched = max(offered - others, 0.0)
        if gains[best][0] > 0:
            self.trials.pays(self.rows[best, target])
        for top in range(first, target):
            used = top == best and gains[best][0] > 0
            option, least = self.rows[top, target], costs[top].min()
            drafts = self.trials.steps * rate * float(seconds[top][min(PLACES, self.longest)])
            if not used and self.trials.due(option, least / size, drafts / size):
                cheapest = np.flatnonzero(costs[top] == least)
                taken = cheapest[self.trials.takes_part(option, len(cheapest))]
                lengths = np.zeros_like(most)
                lengths[taken] = np.minimum(most[taken], PLACES)
                return Plan(verify, self._path(top, feeders, lengths), Round(0.0, token), searched)
        if gains[best][0] <= 0:
            return Plan(verify, gained=searched)
        lengths, feeder = gains[best][1], feeders[best]
        if self.levels[best].ends:
            # It ends by its rows, see `goes_on`.
            lengths = np.where(lengths > 0, most, 0)
        spent, emitted = self._seconds(best, running), 1.0
        if feeder is not None:
            spent = seconds[feeder.level][feeder.tokens]
            spent += self._seconds(best, running * (feeder.tokens + 1))
            emitted = feeder.emitted
        further = Round(rate * float(spent), token, emitted)
        return Plan(verify, self._path(best, feeders, lengths), further, searched)

    def goes_on(
        self,
        level: int,
        slots: np.ndarray,
        estimates: np.ndarray,
        drafted: np.ndarray,
        further: Round,
    ) -> np.ndarray:
        """bool [n], for which drafts of a model for the target a further pass is worth its price.

        What a request's answer reads of other requests is how many they are and what a pass gained
        of them in past proposals: vLLM cuts drafts to the length of a step, so that a token drawn
        for one request would settle, by the length of another's draft, whether it is verified.

        Args:
            level: that drafts.
            slots: [n] int64.
            estimates: [n, width] float64, see `level_verified`.
            drafted: [n] int64 tokens; there are no estimates after them.
            further: what such a pass costs and emits.
        """
        row, places = self.rows[level, self.target], np.arange(estimates.shape[1])
        scale = self.acceptance.scale(row, slots)
        each = self._corrected(row, np.where(np.isnan(estimates), 0.0, estimates), scale)
        survival = np.where(places < drafted[:, None], each, 1.0).prod(1)
        more = np.arange(np.ceil(further.emitted), dtype=np.int64)
        reached = survival[:, None] * self.acceptance.ahead(row, slots, 1) ** (more + 1)
        place = drafted[:, None] + more
        token = further.tokens[np.minimum(place, len(further.tokens) - 1)]
        share = np.minimum(further.emitted - more, 1.0) * (place < self.levels[level].longest)
        gain = ((reached - token) * share).sum(1)
        before, now = self.further[level, self.passes], gain[gain > 0].sum() / self.drafting
        self.further[level, self.passes] += (1 - SHORT_MEMORY) * (now - before) if before else now
        self.passes += 1
        others = (self.drafting - 1) * (before or gain)
        worth: np.ndarray = (gain > 0) & (gain + others >= further.price)
        return worth

    def _cheapest_paths(
        self, slots: np.ndarray, running: int, offer: LookupResult | None, late: np.ndarray
    ) -> tuple[list[Feeder | None], list[np.ndarray]]:
        """By level: its feeder, and seconds [longest + 1] of n tokens.

        What a lookup offers now is the first round; later ones are what they are in the mean.

        Args:
            running: requests of the step, over all of which levels pass.
            late: [levels, n] a step's share of the seconds in which it reads what it has missed.
        """
        # What the levels below have to read; what a level has missed itself, `Reading` weighs.
        fed, tokens = [0.0] * self.target, np.arange(self.longest + 1)
        feeders: list[Feeder | None] = []
        seconds: list[np.ndarray] = []
        for level, own in enumerate(self.levels):
            alone = self._seconds(level, len(slots) if own.looks_up else running)
            best, feeder = alone * (tokens > 0 if own.looks_up else tokens), None
            for below in range(level if own.verifies else 0):
                row, n = self.rows[below, level], np.arange(1, self.levels[below].passed_on + 1)
                survival = np.cumprod(self.acceptance.expected(row, len(n)))
                emitted = 1 + self.acceptance.fill(row) * np.cumsum(survival)
                rounds = seconds[below][n] + self._seconds(level, running * (n + 1))
                first = emitted
                if offer is not None and below == 0:
                    sure = self._survival(row, offer, len(n)).mean(0)
                    first = 1 + np.cumsum(sure)
                cheapest = int((rounds / first).argmin())
                later = np.maximum(tokens - first[cheapest], 0) / emitted[cheapest]
                found = rounds[cheapest] * ((tokens > 0) + later)
                # Of requests that the level itself drafts for.
                more = float(late[below] @ self.reading.reads[level, slots]) + fed[below]
                pays = found[-1] + more < best[-1]
                if pays:
                    self.trials.pays(row)
                if pays or self.trials.due(row):
                    feeder = Feeder(below, int(n[cheapest]), float(emitted[cheapest]))
                    best, fed[level] = found, more
            feeders.append(feeder)
            seconds.append(best)
        seconds = [each + more * (tokens > 0) for each, more in zip(seconds, fed, strict=True)]
        return feeders, seconds

    def _gain(
        self,
        top: int,
        slots: np.ndarray,
        most: np.ndarray,
        verify: np.ndarray,
        drafting: np.ndarray,
        offer: LookupResult | None,
    ) -> tuple[float, np.ndarray, float]:
        """Of the best drafts of one level: what they gain above their price, their lengths [n], and
        tokens accepted.
        """
        if top == 0 and offer is not None:
            survival, fill = self.survival(slots, offer), 1.0
        else:
            row, width = self.rows[top, self.target], self.levels[top].longest
            survival = np.cumprod(self.acceptance.ahead(row, slots, width), axis=1)
            fill = self.acceptance.fill(row)
        survival = np.where(np.arange(survival.shape[1]) < most[:, None], survival, 0.0)
        kept, net = cut(survival, verify, drafting, fill)
        return net, kept.sum(1), fill * float(survival[kept].sum())

    def survival(self, slots: np.ndarray, offer: LookupResult) -> np.ndarray:
        """[n, N] of the tokens of a lookup's offers for the target, 0 where there are none."""
        row = self.rows[0, self.target]
        return self._survival(row, offer, self.levels[0].longest, self.acceptance.scale(row, slots))

    def _survival(
        self, row: int, offer: LookupResult, width: int, scale: np.ndarray | float = 1.0
    ) -> np.ndarray:
        """[n, width] of a lookup's tokens, by its own estimates and what became of such tokens."""
        places = np.arange(width)
        estimates = np.zeros((len(offer.counts), width))
        given = offer.estimates[:, :width]
        estimates[:, : given.shape[1]] = given
        each = self._corrected(row, estimates, scale)
        held = places < offer.counts[:, None]
        found: np.ndarray = np.where(held, np.cumprod(each, axis=1), 0.0)
        return found

    def _corrected(self, row: int, estimates: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
        """[n, width] acceptance of tokens, by their estimates and, with [n] scales, by request."""
        places = np.arange(estimates.shape[1])
        each = self.acceptance.corrected(row, estimates, places) * np.reshape(scale, (-1, 1))
        found: np.ndarray = np.minimum(each, 1.0)
        return found

    def _seconds(self, level: int, tokens: Any) -> Any:
        """Of a level's pass; free until one was timed."""
        times = self.times[level]
        return 0.0 * tokens if times.empty else times.seconds(tokens)

    def _path(self, top: int, feeders: list[Feeder | None], most: np.ndarray) -> StepLevels:
        self.drafting = max(int((most > 0).sum()), 1)
        levels, lengths = [top], [int(most.max())]
        while (feeder := feeders[levels[0]]) is not None:
            levels.insert(0, feeder.level)
            lengths.insert(0, feeder.tokens)
        return StepLevels(tuple(levels), tuple(lengths), most)

    def level_verified(
        self,
        level: int,
        verifier: int,
        slots: np.ndarray,
        *,
        requested: np.ndarray,
        drafted: np.ndarray,
        estimates: np.ndarray,
        accepted: np.ndarray,
        computed: int,
        drafting_seconds: float,
        verifying_seconds: float,
    ) -> None:
        """Learn from a draft of one level that another one has verified.

        Args:
            level, verifier: their numbers.
            slots: [n] int64, the requests.
            requested, drafted, accepted: [n] int64 tokens.
            estimates: [n, width] float64, acceptance of each token by the drafter's own account,
                NaN for none.
            computed: tokens of the verifier's pass; 0 where it needed none.
            drafting_seconds: with everything below the level.
            verifying_seconds: of the verifier.
        """
        self._count(level, verifier, requested, drafted)
        self.learn_acceptance(level, verifier, slots, drafted, estimates, accepted)
        self.times[verifier].observe(computed, verifying_seconds)
        emitted = int((accepted + 1).sum())
        self.goodput[verifier - 1].learn(len(slots), int(drafted.sum()), emitted, drafting_seconds)

    def drafted_for_target(
        self,
        level: int,
        slots: np.ndarray,
        requested: np.ndarray,
        drafted: np.ndarray,
        seconds: float,
    ) -> None:
        """Take note of what the target will verify; arguments as for `level_verified`."""
        self._count(level, self.target, requested, drafted)
        self.waiting[slots], self.drafting_seconds, self.passes = True, seconds, 0

    def step_ended(
        self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray, followed: int = 0
    ) -> None:
        """Learn from the target's step of all requests, [n] each, also of those without drafts.

        Args:
            followed: tokens that requests got along branches.
        """
        own = self.waiting[slots]
        self.waiting[slots] = False
        if own.any():
            passed = int((drafted + self.branch_tokens[slots])[own].sum())
            emitted = int((accepted + 1).sum()) + followed
            self.goodput[-1].learn(len(slots), passed, emitted, self.drafting_seconds)

    def searches_for(self, size: int) -> bool:
        """Whether lookups of level 0 search for so many requests; a step has passed."""
        due = self.feeds or self.searches.due(self.times[0].nearest(size))
        if not due:
            self.trials.wait(self.rows[0, self.target])
        return due

    def searched(self, size: int, running: int, seconds: float, gained: float) -> None:
        """Learn from a search of lookups for `size` requests, and what it gained, see `Plan`.

        All `running` requests of the step wait for it.
        """
        self.times[0].observe(size, seconds)
        # A clock may be too coarse to see a search.
        if not (self.feeds or self.times[0].empty or self.times[-1].empty):
            cost = self.goodput[-1].rate(running) * self.times[0].seconds(size)
            self.searches.observe(self.times[0].nearest(size), size, gained, cost)

    def _count(self, level: int, verifier: int, requested: np.ndarray, drafted: np.ndarray) -> None:
        wanted = requested > 0
        filled = int((wanted & (drafted > 0)).sum())
        self.acceptance.count(self.rows[level, verifier], filled, int(wanted.sum()))

    def learn_acceptance(
        self,
        level: int,
        verifier: int,
        slots: np.ndarray,
        drafted: np.ndarray,
        estimates: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """Learn how many tokens of drafts were accepted; arguments as for `level_verified`."""
        row, width = self.rows[level, verifier], int(drafted.max(initial=0))
        if not width:
            return
        given = estimates[:, :width]
        given = np.where(np.isnan(given), PRIOR_ACCEPTANCE, given)
        expected = self.acceptance.corrected(row, given, np.arange(width))
        self.acceptance.observe(row, slots, given, expected, drafted, accepted)
