"""The choice between several sources of drafts at the lowest level of a cascade.

For each request and round the source and the draft length with the most expected accepted tokens
above their price (`core.prices`) are used; where none is worth its price, nothing is drafted. All
lookups search, since that costs no forward pass, and every offer is compared with the text that is
verified later, whether it was used or not. Only a drafter with forward passes has to draft to be
known; it goes on token by token, by how sure it was of those that it has drafted.

What keeps it lossless: whether a token is drawn is settled before it is. The choice reads the text
so far with the draft so far, the offers, which are functions of texts, the acceptance of past
drafts, and times; never a token that it then drops, nor a uniform that is still to be used. So each
token is drawn from the distribution that it is verified with, whatever the rule.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from vllm_hsd.core.levels import FirstOf
from vllm_hsd.core.offers import STEPS, Offers, step_of
from vllm_hsd.core.prices import FORBIDDEN, Prices

# What a drafter is taken to be worth before it is known: acceptance of each of its tokens.
DRAFTER_ACCEPTANCE = 0.7
# Accepted tokens, all of them expected, that stand for what is not known of a request.
PRIOR_TOKENS = 6.0
# Decay of an observed acceptance with each further one in the same request, and in any request.
MEMORY, SHARED_MEMORY = 0.97, 0.999
# No estimate is surer than this of a token.
SUREST = 0.98
# Places in a draft that are told apart, and verified tokens, as the source itself expects, that
# each place and step of an estimate begins with.
PLACES, PRIOR_VERIFIED = 4, 4.0
# A drafter that was passed over gets another try after so many rounds, and later after more.
RETRY_ROUNDS, MOST_RETRY_ROUNDS = 32, 1024


class SourceChoice:
    """Chooses a source per request; remembers offers and what was accepted, indexed by slot.

    A source's own estimates are corrected twice: by what became of tokens with such estimates in
    all requests, and by what was seen of the source in this request, accepted tokens over expected
    ones. A request that must repeat leaves out the first, and pays fixed prices.

    Args:
        sources: what there is to choose from.
        num_slots: requests at the same time.
        length: longest draft.
    """

    def __init__(self, sources: FirstOf, num_slots: int, length: int) -> None:
        self.sources, self.length = sources, length
        count = len(sources.names)
        # Accepted and verified tokens by source, place in the draft and the source's own estimate.
        self.shared = np.zeros((2, count, PLACES, STEPS))
        # Accepted, expected and verified tokens by source and request.
        self.own = np.zeros((3, count, num_slots))
        self.passed_over = np.zeros(num_slots, dtype=np.int64)
        self.pause = np.full(num_slots, RETRY_ROUNDS)
        # The same for requests that need not repeat together: they share a try.
        self.rested, self.shared_pause = 0, RETRY_ROUNDS
        # The last offer of every source: where it begins, its tokens, its own and our estimates.
        self.starts = np.zeros((count, num_slots), dtype=np.int64)
        self.counts = np.zeros((count, num_slots), dtype=np.int64)
        self.token_ids = np.zeros((count, num_slots, length), dtype=np.int64)
        self.steps = np.zeros((count, num_slots, length), dtype=np.int64)
        self.estimates = np.zeros((count, num_slots, length))
        # Prices of this step, and the fixed ones.
        self.verify_price = np.zeros((2, length + 1))
        self.forward_price, self.sharing = np.zeros(2), np.ones(2)
        self.price(None, None)

    def price(self, prices: Prices | None, repeats: np.ndarray | None) -> None:
        """Set the prices of the next rounds.

        Args:
            prices: of this step, None for the fixed ones.
            repeats: [slots] bool, requests whose drafts must not depend on times or on others;
                None for all.
        """
        fixed = Prices.fixed(self.length, self.sources.drafter_cost)
        for row, paid in ((0, prices or fixed), (1, fixed)):
            self.verify_price[row], self.forward_price[row] = paid.verify, paid.forward
            self.sharing[row] = paid.size
        self.repeats = np.ones(len(self.passed_over), dtype=bool) if repeats is None else repeats

    def score(
        self, tokens: np.ndarray, rows: np.ndarray, slots: np.ndarray, ends: np.ndarray
    ) -> None:
        """Compare the last offers with the text that was verified since.

        Args:
            tokens: [table rows, max length] int32.
            rows: [n] int64, rows of the requests in `tokens`.
            slots: [n] int64.
            ends: [n] int64, tokens in the texts, all of them verified by the model above.
        """
        counts = self.counts[:, slots]
        if not counts.any():
            return
        starts = self.starts[:, slots]
        # A text that ends where the offer began or before has changed before the offer.
        known = np.maximum(np.minimum(counts, ends - starts), 0)
        self.counts[:, slots] = 0
        if not known.any():
            return
        place = np.arange(self.length)
        at = np.minimum(starts[..., None] + place, tokens.shape[1] - 1)
        same = tokens[rows[:, None], at] == self.token_ids[:, slots]
        same &= place < known[..., None]
        matched = np.logical_and.accumulate(same, axis=2).sum(2)
        tried = place < np.minimum(matched + 1, known)[..., None]
        own = self.own[:, :, slots]
        own *= np.where(known > 0, MEMORY, 1.0)
        own[0] += matched
        own[1] += (self.estimates[:, slots] * tried).sum(2)
        own[2] += tried.sum(2)
        self.own[:, :, slots] = own
        source, request, where = tried.nonzero()
        group = (source, np.minimum(where, PLACES - 1), self.steps[:, slots][tried])
        self.shared *= SHARED_MEMORY ** len(slots)
        np.add.at(self.shared[0], group, where < matched[source, request])
        np.add.at(self.shared[1], group, 1)

    def corrected(self, offers: Offers, slots: np.ndarray, first: int = 0) -> np.ndarray:
        """[S, n, width] float64 estimates by what became of tokens with such, in all requests.

        Args:
            offers: of the sources first, first + 1, ...
            slots: [n] int64.
        """
        if offers.corrected is None:
            count, _, width = offers.estimates.shape
            source = np.arange(first, first + count)[:, None, None]
            offers.corrected = self._learned(
                offers.estimates, offers.steps, source, np.arange(width), self.repeats[slots, None]
            )
        return offers.corrected

    def _learned(
        self,
        estimates: np.ndarray,
        steps: np.ndarray,
        source: np.ndarray | int,
        place: np.ndarray,
        repeats: np.ndarray,
    ) -> np.ndarray:
        """Estimates by what became of tokens with such; all arguments are broadcast."""
        accepted, verified = self.shared[:, source, np.minimum(place, PLACES - 1), steps]
        found = (accepted + PRIOR_VERIFIED * estimates) / (verified + PRIOR_VERIFIED)
        return np.where(repeats, estimates, found)

    def remember_first(
        self, slots: np.ndarray, ends: np.ndarray, offers: Offers, first: np.ndarray
    ) -> None:
        """Keep the offers that continue verified text: those of requests where `first` holds."""
        if first.all():
            self.remember(0, slots, ends, offers)
        elif first.any():
            self.remember(0, slots[first], ends[first], offers.of_requests(first))

    def note_use(self, slots: np.ndarray, used: np.ndarray, paid: np.ndarray) -> None:
        """Count the rounds in which the drafter was passed over.

        Args:
            slots: [n] int64.
            used: [n] bool, it drafts in this round.
            paid: [n] bool, because it is worth its price, not only for another try.
        """
        longer = np.minimum(2 * self.pause[slots], MOST_RETRY_ROUNDS)
        pause = np.where(used, longer, self.pause[slots])
        self.pause[slots] = np.where(paid, RETRY_ROUNDS, pause)
        self.passed_over[slots] = np.where(used, 0, self.passed_over[slots] + 1)
        shared = ~self.repeats[slots]
        if not shared.any():
            return
        self.rested += 1
        if used[shared].any():
            self.rested = 0
            self.shared_pause = min(2 * self.shared_pause, MOST_RETRY_ROUNDS)
        if paid[shared].any():
            self.shared_pause = RETRY_ROUNDS

    def remember(self, first: int, slots: np.ndarray, starts: np.ndarray, offers: Offers) -> None:
        """Keep what the sources first, first + 1, ... offer until the texts go on.

        Args:
            first: number of the first source.
            slots, starts: [n] int64; an offer begins at position starts[i].
            offers: of these sources.
        """
        count, _, width = offers.token_ids.shape
        sources = slice(first, first + count)
        self.starts[sources, slots], self.counts[sources, slots] = starts, offers.counts
        self.token_ids[sources, slots, :width] = offers.token_ids
        self.steps[sources, slots, :width] = offers.steps
        self.estimates[sources, slots, :width] = self.corrected(offers, slots, first)

    def best(
        self,
        slots: np.ndarray,
        offers: Offers,
        room: np.ndarray,
        sure: np.ndarray,
        placed: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The source that drafts next for each request, and how many tokens of its offer.

        Args:
            slots: [n] int64.
            offers: of the lookups.
            room: [n] int64, tokens that may still be drafted.
            sure: [n] float64, probability that all tokens drafted so far are accepted.
            placed: [n] int64, tokens drafted so far.

        Returns:
            lookup [n] int64, -1 for none; tokens of its offer [n] int64; probability [n] that all
            tokens drafted then are accepted.
        """
        count, n, width = offers.token_ids.shape
        scale = self.scale(slice(0, count), slots)[..., None]
        scaled = np.minimum(self.corrected(offers, slots) * scale, SUREST)
        survival = sure[:, None] * np.cumprod(scaled, axis=2)
        net = np.cumsum(survival, axis=2) - self._verify_prices(slots, placed, width)
        allowed = survival >= max(self.sources.min_acceptance, sys.float_info.min)
        allowed &= np.arange(width) < offers.counts[..., None]
        net[~allowed] = -np.inf
        likely, own = net.argmax(2), np.arange(n)
        at = (np.arange(count)[:, None], own, likely)
        total, then_sure = net[at], survival[at]
        total[total <= 0] = -np.inf
        value: np.ndarray | float = 0.0
        if self.sources.drafter is not None:
            value = self.drafter_value(slots, room, sure, placed)
            for source in range(count):
                tokens = likely[source] + 1
                after = room - tokens, then_sure[source], placed + tokens
                total[source] += self.drafter_value(slots, *after)
        # Of equals the last one.
        lookup = count - 1 - total[::-1].argmax(0)
        taken = total[lookup, own] >= value
        return (
            np.where(taken, lookup, -1),
            np.where(taken, likely[lookup, own] + 1, 0),
            np.where(taken, then_sure[lookup, own], sure),
        )

    def drafter_value(
        self, slots: np.ndarray, room: np.ndarray, sure: np.ndarray, placed: np.ndarray
    ) -> np.ndarray:
        """[n] float64, expected tokens of the drafter from here, above their price; see `best`."""
        if self.sources.drafter is None:
            return np.zeros(len(slots))
        gains = self._drafter_gains(slots, room, sure, placed, np.zeros_like(placed))
        return self._above_price(slots, gains)

    def _above_price(self, slots: np.ndarray, gains: np.ndarray) -> np.ndarray:
        """[n] float64, what the best number of tokens gains; [n, length] gains of 1, 2, ..."""
        share = (self.forward_price / self.sharing)[self._row(slots)]
        return np.maximum((gains - share[:, None] * np.arange(1, self.length + 1)).max(1), 0.0)

    def begins(
        self, slots: np.ndarray, room: np.ndarray, sure: np.ndarray, placed: np.ndarray
    ) -> np.ndarray:
        """[n] bool, requests that the drafter drafts a token for: it pays, or is due for a try.

        See `best`.
        """
        if self.sources.drafter is None or not len(slots):
            return np.zeros(len(slots), dtype=bool)
        paid = self.goes_on(slots, room, sure, placed, np.zeros_like(placed))
        shared = ~self.repeats[slots]
        due = (self.passed_over[slots] >= self.pause[slots]) & (room > 0)
        due &= ~shared | (self.rested >= self.shared_pause)
        self.note_use(slots, due | paid, paid)
        return due | paid

    def goes_on(
        self,
        slots: np.ndarray,
        room: np.ndarray,
        sure: np.ndarray,
        placed: np.ndarray,
        drafted: np.ndarray,
    ) -> np.ndarray:
        """[n] bool, requests that another token of the drafter pays for; they share its pass.

        Args:
            slots, room, sure, placed: see `best`.
            drafted: [n] int64, tokens of the draft that are the drafter's.
        """
        gains = self._drafter_gains(slots, room, sure, placed, drafted)
        going = self._above_price(slots, gains) > 0
        shared = ~self.repeats[slots]
        if shared.any():
            own = np.maximum(np.diff(gains[shared], axis=1, prepend=0.0), 0.0)
            pays = np.cumsum(own.sum(0) - self.forward_price[0]).max() > 0
            going[shared] = pays & (own[:, 0] > 0)
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
        drafter = len(self.sources.lookups)
        steps, repeats = step_of(confidence), self.repeats[slots]
        found = self._learned(confidence, steps, drafter, drafted, repeats)
        return np.minimum(found * self.scale(drafter, slots), SUREST)

    def _drafter_gains(
        self,
        slots: np.ndarray,
        room: np.ndarray,
        sure: np.ndarray,
        placed: np.ndarray,
        drafted: np.ndarray,
    ) -> np.ndarray:
        """[n, length] expected tokens of 1, 2, ... drafter's tokens, above what verifying costs."""
        drafter = len(self.sources.lookups)
        # How sure the drafter will be is not known yet: the mean over all that it has been.
        accepted, verified = self.shared[:, drafter].sum(-1)
        known = (accepted + PRIOR_VERIFIED * DRAFTER_ACCEPTANCE) / (verified + PRIOR_VERIFIED)
        place = drafted[:, None] + np.arange(self.length)
        each = known[np.minimum(place, PLACES - 1)] * self.scale(drafter, slots)[:, None]
        kept, _, seen = self.own[:, drafter, slots]
        alone = (kept + PRIOR_TOKENS * DRAFTER_ACCEPTANCE) / (seen + PRIOR_TOKENS)
        each = np.where(self.repeats[slots, None], alone[:, None], each)
        survival = sure[:, None] * np.cumprod(np.minimum(each, SUREST), axis=1)
        gains = np.cumsum(survival, axis=1) - self._verify_prices(slots, placed, self.length)
        gains[np.arange(self.length) >= room[:, None]] = -FORBIDDEN
        return gains

    def _row(self, slots: np.ndarray) -> np.ndarray:
        """[n] which prices each request pays."""
        return self.repeats[slots].astype(np.int64)

    def _verify_prices(self, slots: np.ndarray, placed: np.ndarray, width: int) -> np.ndarray:
        """[n, width] price of verifying 1, 2, ... tokens more than are placed."""
        prices = self.verify_price[self._row(slots)]
        if not placed.any():
            return prices[:, 1 : width + 1]
        own = np.arange(len(slots))[:, None]
        upto = np.minimum(placed[:, None] + np.arange(1, width + 1), self.length)
        return prices[own, upto] - prices[own, placed[:, None]]

    def scale(self, source: int | slice, slots: np.ndarray) -> np.ndarray:
        """Accepted over expected tokens of a source, 1 before anything is known: [n], or [S, n]."""
        accepted, expected = self.own[:2, source, slots] + PRIOR_TOKENS
        return accepted / expected

    def forget(self, slot: int) -> None:
        """See `core.levels.PerRequest`."""
        self.counts[:, slot] = 0
        self.own[:, :, slot] = 0
        self.passed_over[slot], self.pause[slot] = 0, RETRY_ROUNDS

    def set_aside(self, slot: int) -> Any:
        """See `core.levels.PerRequest`."""
        return self.own[:, :, slot].copy(), self.passed_over[slot], self.pause[slot]

    def restore(self, slot: int, kept: Any) -> None:
        """See `core.levels.PerRequest`."""
        self.own[:, :, slot], self.passed_over[slot], self.pause[slot] = kept
