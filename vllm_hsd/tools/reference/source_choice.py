"""Which source of a lowest level drafts, and how much: by the rule of `budget.draft_budget`.

All lookups search in every round, since that costs no forward pass, and every offer is compared
with the text that is verified later, whether it was used or not. Only a drafter with forward passes
has to draft to be known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_hsd.budget.acceptance import AcceptanceEstimates
from vllm_hsd.budget.draft_budget import FORBIDDEN, DraftBudget, cut
from vllm_hsd.budget.trials import Trials
from vllm_hsd.cascade.level import LookupResult, Sources, Texts

# Options of the trials.
_LOOKUPS, _DRAFTER = 0, 1


@dataclass
class Offers:
    """What S sources offer n requests.

    Attributes:
        token_ids: [S, n, width] int64.
        counts: [S, n] int64.
        estimates: [S, n, width] float64, the source's own acceptance probability of each token
            after the ones before.
        expected: [S, n, width] float64, those as `AcceptanceEstimates.corrected`.
    """

    token_ids: np.ndarray
    counts: np.ndarray
    estimates: np.ndarray
    expected: np.ndarray

    @classmethod
    def of(cls, found: Sequence[LookupResult], acceptance: AcceptanceEstimates) -> Offers:
        """What the first lookups found for the same requests, at least one, all of one width."""
        estimates = np.stack([lookup.estimates for lookup in found])
        source, place = np.arange(len(found))[:, None, None], np.arange(estimates.shape[2])
        return cls(
            np.stack([lookup.token_ids for lookup in found]),
            np.stack([lookup.counts for lookup in found]),
            estimates,
            acceptance.corrected(source, estimates, place),
        )


class SourceChoice:
    """Decides token by token; a drafter goes on as long as another pass of it pays.

    Args:
        sources: of the lowest level.
        budget: prices and acceptance, of the whole cascade.
        num_slots: requests at the same time.

    Attributes:
        last: the last offers of all sources by slot, until the text goes on.
        starts: [sources, slots] int64 positions at which they begin.
        drafter: number of the source that has forward passes.
    """

    def __init__(self, sources: Sources, budget: DraftBudget, num_slots: int) -> None:
        self.sources, self.budget = sources, budget
        shape = (len(sources.names), num_slots, budget.lengths[0])
        self.starts = np.zeros(shape[:2], dtype=np.int64)
        self.last = Offers(
            np.zeros(shape, dtype=np.int64),
            np.zeros(shape[:2], dtype=np.int64),
            np.zeros(shape),
            np.zeros(shape),
        )
        self.drafter = len(sources.lookups)
        self.trials = Trials(2)
        # The draft under way: its verifier, and tokens placed for all requests.
        self.verifier, self.placed = budget.target, 0

    def forget(self, slot: int) -> None:
        """See `Cascade.forget`."""
        self.last.counts[:, slot] = 0

    def begin(self, verifier: int, texts: Texts) -> None:
        """A draft for `verifier` begins: compare the last offers with the texts that it verified.

        `verifier` is the level, or the number of levels for the target.
        """
        tokens, rows, slots, ends = texts
        self.verifier, self.placed = verifier, 0
        self.budget.gained = 0.0
        starts, counts = self.starts[:, slots], self.last.counts[:, slots]
        # A text that ends where the offer began or before has changed before the offer.
        known = np.maximum(np.minimum(counts, ends - starts), 0)
        self.last.counts[:, slots] = 0
        if not known.any():
            return
        place = np.arange(self.last.token_ids.shape[2])
        at = np.minimum(starts[..., None] + place, tokens.shape[1] - 1)
        same = tokens[rows[:, None], at] == self.last.token_ids[:, slots]
        same &= place < known[..., None]
        matched = np.logical_and.accumulate(same, axis=2).sum(2)
        estimates, expected = self.last.estimates[:, slots], self.last.expected[:, slots]
        every = slice(0, len(known))
        self.budget.acceptance.observe(every, slots, estimates, expected, known, matched)

    def remember(self, first: int, slots: np.ndarray, starts: np.ndarray, offers: Offers) -> None:
        """Keep what the sources first, first + 1, ... offer after the verified text.

        Args:
            first: number of the first source.
            slots, starts: [n] int64; an offer begins at position starts[i].
            offers: of these sources.
        """
        count, _, width = offers.token_ids.shape
        sources, last = slice(first, first + count), self.last
        self.starts[sources, slots], last.counts[sources, slots] = starts, offers.counts
        last.token_ids[sources, slots, :width] = offers.token_ids
        last.estimates[sources, slots, :width] = offers.estimates
        last.expected[sources, slots, :width] = offers.expected

    def best_of(self, slots: np.ndarray, found: Sequence[LookupResult]) -> LookupResult:
        """Of each request the offer of most expected tokens, by what became of such offers."""
        acceptance = self.budget.acceptance
        offers = Offers.of(found, acceptance)
        count, n, width = offers.token_ids.shape
        scale = acceptance.scale(slice(0, count), slots)[..., None]
        confidence = np.cumprod(np.minimum(offers.expected * scale, 1.0), axis=2)
        confidence *= np.arange(width) < offers.counts[..., None]
        best, own = confidence.sum(2).argmax(0), np.arange(n)
        chosen = offers.token_ids[best, own], offers.counts[best, own], confidence[best, own]
        return LookupResult(*chosen)

    def best(
        self, slots: np.ndarray, offers: Offers, room: np.ndarray, sure: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The source that drafts next for each request, and how many tokens of its offer.

        Args:
            slots: [n] int64.
            offers: of the lookups.
            room: [n] int64, tokens that may still be drafted.
            sure: [n] float64, probability that all tokens drafted so far are accepted.

        Returns:
            lookup [n] int64, -1 for none; tokens of its offer [n] int64; probability [n] that all
            tokens drafted then are accepted.
        """
        count, n, width = offers.token_ids.shape
        scale = self.budget.acceptance.scale(slice(0, count), slots)[..., None]
        survival = sure[:, None] * np.cumprod(np.minimum(offers.expected * scale, 1.0), axis=2)
        survival *= np.arange(width) < np.minimum(offers.counts, room)[..., None]
        survival[survival < self.sources.min_acceptance] = 0.0
        # Sources are compared at the price of a token where all offers are drafted.
        verify, offered = self.budget.step.verify[self.verifier], int(offers.counts.max(0).sum())
        start, end = np.minimum([self.placed, self.placed + offered], len(verify) - 1)
        price = (verify[end] - verify[start]) / max(end - start, 1)
        values = np.maximum(survival - price, 0.0).sum(2)
        # Of equals the last one.
        lookup, own = count - 1 - values[::-1].argmax(0), np.arange(n)
        chosen = survival[lookup, own]
        chosen[self._drafter_values(slots, room, sure) > values[lookup, own]] = 0.0
        least, net = cut(chosen, verify, self.placed)
        self.budget.gained += net
        if least < np.inf:
            self.trials.pays(_LOOKUPS)
        elif not self.placed and self._may_try(_LOOKUPS):
            # What long drafts cost may have been overestimated, and is not seen without any.
            least, chosen = 0.0, chosen * self.trials.takes_part(_LOOKUPS, n)[:, None]
        counts = ((chosen >= least) & (chosen > 0)).sum(1)
        self.placed += int(counts.sum())
        last = np.maximum(counts - 1, 0)
        return (
            np.where(counts > 0, lookup, -1),
            counts,
            np.where(counts > 0, chosen[own, last], sure),
        )

    def begins(self, slots: np.ndarray, room: np.ndarray, sure: np.ndarray) -> np.ndarray:
        """[n] bool, requests that the drafter drafts a token for: it pays, or is due for a trial.

        Args: see `best`.
        """
        going = self.goes_on(slots, room, sure, np.zeros(len(slots), dtype=np.int64))
        if going.any():
            self.trials.pays(_DRAFTER)
        elif len(slots) and self._may_try(_DRAFTER):
            return self.trials.takes_part(_DRAFTER, len(slots)) & (room > 0)
        return going

    def goes_on(
        self, slots: np.ndarray, room: np.ndarray, sure: np.ndarray, drafted: np.ndarray
    ) -> np.ndarray:
        """[n] bool, requests that another token of the drafter pays for; they share its pass.

        Args:
            slots, room, sure: see `best`.
            drafted: [n] int64, tokens of the draft that are the drafter's.
        """
        net = self._drafter_net(slots, room, sure, drafted)
        # What all requests gain up to each place, those left out that gain nothing.
        gained = np.maximum.accumulate(np.maximum(net, 0.0), axis=1).sum(0)
        passes = self.budget.step.forward[self.verifier] * np.arange(1, net.shape[1] + 1)
        pays = (gained - passes).max(initial=0.0) > 0
        going: np.ndarray = pays & (net > 0).any(1)
        return going

    def acceptance_of(
        self, slots: np.ndarray, confidence: np.ndarray, drafted: np.ndarray
    ) -> np.ndarray:
        """[n] float64, expected acceptance of a token that the drafter has just drafted.

        Args:
            slots: [n] int64.
            confidence: [n] float64, highest probability of what the token was drawn from.
            drafted: [n] int64, tokens of the drafter before it.
        """
        self.placed += len(slots)
        acceptance = self.budget.acceptance
        found = acceptance.corrected(self.drafter, confidence, drafted)
        expected: np.ndarray = np.minimum(found * acceptance.scale(self.drafter, slots), 1.0)
        return expected

    def drafter_offered(
        self,
        slots: np.ndarray,
        starts: np.ndarray,
        token_ids: np.ndarray,
        counts: np.ndarray,
        confidence: np.ndarray,
    ) -> None:
        """Keep what the drafter has drafted, as an offer of its own.

        Args:
            slots, starts, counts: [n] int64; counts[i] tokens from position starts[i] on.
            token_ids: [n, width] int64.
            confidence: [n, width] float64, see `acceptance_of`.
        """
        place = np.arange(confidence.shape[1])
        expected = self.budget.acceptance.corrected(self.drafter, confidence, place)
        offers = Offers(token_ids[None], counts[None], confidence[None], expected[None])
        self.remember(self.drafter, slots, starts, offers)

    def _drafter_values(self, slots: np.ndarray, room: np.ndarray, sure: np.ndarray) -> np.ndarray:
        """[n] float64, gains of the drafter's tokens above their price and a share of passes."""
        if self.sources.drafter is None:
            return np.zeros(len(slots))
        net = self._drafter_net(slots, room, sure, np.zeros(len(slots), dtype=np.int64))
        share = self.budget.step.forward[self.verifier] / len(slots)
        gains: np.ndarray = net - share * np.arange(1, net.shape[1] + 1)
        best: np.ndarray = gains.max(1, initial=0.0)
        return best

    def _drafter_net(
        self, slots: np.ndarray, room: np.ndarray, sure: np.ndarray, drafted: np.ndarray
    ) -> np.ndarray:
        """[n, width] what 1, 2, ... more tokens of the drafter gain above what verifying costs."""
        width, size = int(room.max(initial=0)), len(slots)
        each = self.budget.acceptance.ahead(self.drafter, slots, drafted, width)
        survival = sure[:, None] * np.cumprod(each, axis=1)
        verify = self.budget.step.verify[self.verifier]
        upto = np.minimum(self.placed + size * np.arange(width + 1), len(verify) - 1)
        gains = survival - np.diff(verify[upto]) / size
        gains[np.arange(width) >= room[:, None]] = -FORBIDDEN
        return np.cumsum(gains, axis=1)

    def _may_try(self, option: int) -> bool:
        return self.budget.step.forward[self.verifier] < FORBIDDEN and self.trials.due(option)
