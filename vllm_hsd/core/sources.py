"""The choice between several sources of drafts at the lowest level of a cascade.

For each request and round the source with the best expected draft is used. All lookups are asked,
since that costs no forward pass, and every offer is compared with the text that is verified later,
whether it was used or not. Only a drafter with forward passes has to draft to be known.

What keeps it lossless: the choice is made before any token is drawn. It reads the text so far, the
offers, which are functions of texts, and the verdicts on earlier drafts; never a token that it then
drops, nor a uniform that is still to be used. So each token is drawn from the distribution that it
is verified with, whatever the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_hsd.core.levels import FirstOf, Lookup

# What a drafter is taken to be worth before it is known: acceptance of each of its tokens.
DRAFTER_ACCEPTANCE = 0.7
# Accepted tokens, all of them expected, that every source begins with.
PRIOR_TOKENS = 6.0
# So few expected tokens say nothing yet.
LEAST_EXPECTED = 0.1
# Weight of a verdict after each further one.
MEMORY = 0.95
# No estimate is surer than this of a token.
SUREST = 0.98
# A drafter that was passed over gets another try after so many rounds.
RETRY_ROUNDS = 32


class SourceChoice:
    """Chooses a source per request; remembers offers and verdicts, indexed by slot.

    A source's estimates of its own acceptance are scaled by what was seen of it in this request:
    accepted tokens over the ones that it expected. Nothing is carried from one request to another.

    Args:
        sources: what there is to choose from.
        num_slots: requests at the same time.
        length: longest draft.
    """

    def __init__(self, sources: FirstOf, num_slots: int, length: int) -> None:
        self.sources, self.length = sources, length
        count = len(sources.names)
        self.seen = np.full((count, num_slots), PRIOR_TOKENS)
        self.expected = np.full((count, num_slots), PRIOR_TOKENS)
        self.passed_over = np.zeros(num_slots, dtype=np.int64)
        # The last offer of every source: where it begins, its tokens, and its own estimates.
        self.starts = np.zeros((count, num_slots), dtype=np.int64)
        self.counts = np.zeros((count, num_slots), dtype=np.int64)
        self.token_ids = np.zeros((count, num_slots, length), dtype=np.int64)
        self.estimates = np.zeros((count, num_slots, length))

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
        position = np.arange(self.length)
        for source in range(len(self.seen)):
            starts = self.starts[source, slots]
            # A text that ends where the offer began or before has changed before the offer.
            known = np.clip(np.minimum(self.counts[source, slots], ends - starts), 0, None)
            at = np.minimum(starts[:, None] + position, tokens.shape[1] - 1)
            same = tokens[rows[:, None], at] == self.token_ids[source, slots]
            same &= position < known[:, None]
            matched = np.logical_and.accumulate(same, axis=1).sum(1)
            reached = np.minimum(matched + 1, known)
            tried = position < reached[:, None]
            expected = (self.estimates[source, slots] * tried).sum(1)
            fade = np.where(known > 0, MEMORY, 1.0)
            self.seen[source, slots] = self.seen[source, slots] * fade + matched
            self.expected[source, slots] = self.expected[source, slots] * fade + expected
        self.counts[:, slots] = 0

    def remember_first(
        self, slots: np.ndarray, ends: np.ndarray, offers: Sequence[Lookup], first: np.ndarray
    ) -> None:
        """Keep the offers that continue verified text: those of requests where `first` holds."""
        for source, offer in enumerate(offers):
            self.remember(
                source,
                slots[first],
                ends[first],
                offer.token_ids[first],
                offer.counts[first],
                conditional(offer.confidence[first]),
            )

    def note_use(self, slots: np.ndarray, used: np.ndarray) -> None:
        """Count the rounds in which the drafter was passed over: [n] slots, [n] bool."""
        self.passed_over[slots] = np.where(used, 0, self.passed_over[slots] + 1)

    def remember(
        self,
        source: int,
        slots: np.ndarray,
        starts: np.ndarray,
        token_ids: np.ndarray,
        counts: np.ndarray,
        estimates: np.ndarray,
    ) -> None:
        """Keep a source's offers until the texts go on.

        Args:
            source: its number.
            slots, starts, counts: [n] int64; an offer begins at position starts[i].
            token_ids: [n, width] int64.
            estimates: [n, width] float64, the source's own acceptance probability of each token
                after the ones before.
        """
        width = token_ids.shape[1]
        self.starts[source, slots], self.counts[source, slots] = starts, counts
        self.token_ids[source, slots, :width] = token_ids
        self.estimates[source, slots, :width] = estimates

    def best(
        self,
        slots: np.ndarray,
        offers: Sequence[Lookup],
        room: np.ndarray,
        sure: np.ndarray,
        gained: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The source that drafts next for each request, and how many tokens of its offer.

        Args:
            slots: [n] int64.
            offers: one per lookup.
            room: [n] int64, tokens that may still be drafted.
            sure: [n] float64, probability that all tokens drafted so far are accepted.
            gained: [n] float64, expected accepted ones of them.

        Returns:
            lookup [n] int64, -1 for none; tokens of its offer [n] int64; probability [n, width]
            that the first of them are accepted, `sure` included.
        """
        alone = self.drafter_value(slots, room, sure, gained)
        best, lookup, counts = alone, np.full(len(slots), -1), np.zeros(len(slots), dtype=np.int64)
        width = max((offer.token_ids.shape[1] for offer in offers), default=0)
        accepted = np.zeros((len(slots), width))
        for source, offer in enumerate(offers):
            estimates = conditional(offer.confidence)
            scaled = np.minimum(estimates * self.scale(source, slots)[:, None], SUREST)
            survival = sure[:, None] * np.cumprod(scaled, axis=1)
            survival[np.arange(survival.shape[1]) >= offer.counts[:, None]] = 0
            likely = ((survival >= self.sources.min_acceptance) & (survival > 0)).sum(1)
            survival[np.arange(survival.shape[1]) >= likely[:, None]] = 0
            after = survival[np.arange(len(slots)), np.maximum(likely - 1, 0)]
            total = gained + survival.sum(1)
            value = np.maximum(1 + total, self.drafter_value(slots, room - likely, after, total))
            better = (likely > 0) & (value >= best)
            best = np.where(better, value, best)
            lookup[better], counts[better] = source, likely[better]
            accepted[better, : survival.shape[1]] = survival[better]
        return lookup, counts, accepted

    def drafter_value(
        self, slots: np.ndarray, room: np.ndarray, sure: np.ndarray, gained: np.ndarray
    ) -> np.ndarray:
        """[n] expected tokens per step's time if the drafter goes on from here.

        See `best`; without a drafter, or with one that is passed over, nothing is drafted.
        """
        if self.sources.drafter is None:
            return 1 + gained
        each = np.minimum(self.drafter_acceptance(slots), SUREST)
        more = sure * each * (1 - each**room) / (1 - each)
        value = (1 + gained + more) / (1 + self.sources.drafter_cost * room)
        return np.where(self.drafts(slots, room), value, 1 + gained)

    def drafts(self, slots: np.ndarray, room: np.ndarray) -> np.ndarray:
        """[n] bool, whether the drafter is worth its time, or is due for another try."""
        if self.sources.drafter is None:
            return np.zeros(len(slots), dtype=bool)
        each = np.minimum(self.drafter_acceptance(slots), SUREST)
        first = np.minimum(room, 1)
        pays = each * first > self.sources.drafter_cost * first
        return pays | ((self.passed_over[slots] >= RETRY_ROUNDS) & (room > 0))

    def drafter_acceptance(self, slots: np.ndarray) -> np.ndarray:
        """[n] estimated acceptance of each token of the drafter."""
        return DRAFTER_ACCEPTANCE * self.scale(len(self.sources.lookups), slots)

    def scale(self, source: int, slots: np.ndarray) -> np.ndarray:
        """[n] accepted over expected tokens of a source, 1 before anything is known."""
        return self.seen[source, slots] / np.maximum(self.expected[source, slots], LEAST_EXPECTED)

    def forget(self, slot: int) -> None:
        """See `core.levels.PerRequest`."""
        self.counts[:, slot] = 0
        self.seen[:, slot] = self.expected[:, slot] = PRIOR_TOKENS
        self.passed_over[slot] = 0

    def set_aside(self, slot: int) -> Any:
        """See `core.levels.PerRequest`."""
        return self.seen[:, slot].copy(), self.expected[:, slot].copy(), self.passed_over[slot]

    def restore(self, slot: int, kept: Any) -> None:
        """See `core.levels.PerRequest`."""
        self.seen[:, slot], self.expected[:, slot], self.passed_over[slot] = kept


def conditional(confidence: np.ndarray) -> np.ndarray:
    """Acceptance of each token after the ones before, from that of the first tokens: [n, width]."""
    before = np.concatenate((np.ones((len(confidence), 1)), confidence[:, :-1]), axis=1)
    return np.divide(confidence, before, out=np.zeros_like(confidence), where=before > 0)
