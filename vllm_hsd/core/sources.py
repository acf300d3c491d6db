"""What the sources of a lowest level offer, and what became of it.

All lookups search in every round, since that costs no forward pass, and every offer is compared
with the text that is verified later, whether it was used or not. Only a drafter with forward passes
has to draft to be known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_hsd.core.acceptance import AcceptanceEstimates
from vllm_hsd.core.levels import LookupResult


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
        confidence = np.stack([lookup.confidence for lookup in found])
        estimates = confidence.copy()
        before, after = confidence[..., :-1], confidence[..., 1:]
        np.divide(after, before, out=estimates[..., 1:], where=before > 0)
        source, place = np.arange(len(found))[:, None, None], np.arange(confidence.shape[2])
        return cls(
            np.stack([lookup.token_ids for lookup in found]),
            np.stack([lookup.counts for lookup in found]),
            estimates,
            acceptance.corrected(source, estimates, place),
        )


class OfferRecord:
    """The last offer of every source, by slot, until the text goes on.

    Args:
        count: sources.
        num_slots: requests at the same time.
        length: longest draft.
    """

    def __init__(self, count: int, num_slots: int, length: int) -> None:
        self.length = length
        self.starts = np.zeros((count, num_slots), dtype=np.int64)
        self.counts = np.zeros((count, num_slots), dtype=np.int64)
        self.token_ids = np.zeros((count, num_slots, length), dtype=np.int64)
        self.estimates = np.zeros((count, num_slots, length))
        self.expected = np.zeros((count, num_slots, length))

    def remember(self, first: int, slots: np.ndarray, starts: np.ndarray, offers: Offers) -> None:
        """Keep what the sources first, first + 1, ... offer after the verified text.

        Args:
            first: number of the first source.
            slots, starts: [n] int64; an offer begins at position starts[i].
            offers: of these sources.
        """
        count, _, width = offers.token_ids.shape
        sources = slice(first, first + count)
        self.starts[sources, slots], self.counts[sources, slots] = starts, offers.counts
        self.token_ids[sources, slots, :width] = offers.token_ids
        self.estimates[sources, slots, :width] = offers.estimates
        self.expected[sources, slots, :width] = offers.expected

    def score(
        self,
        acceptance: AcceptanceEstimates,
        tokens: np.ndarray,
        rows: np.ndarray,
        slots: np.ndarray,
        ends: np.ndarray,
    ) -> None:
        """Compare the last offers with the text that was verified since.

        Args:
            acceptance: learns from them; its first rows are the sources.
            tokens: [table rows, max length] int32.
            rows: [n] int64, rows of the requests in `tokens`.
            slots: [n] int64.
            ends: [n] int64, tokens in the texts, all of them verified by the model above.
        """
        starts, counts = self.starts[:, slots], self.counts[:, slots]
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
        estimates, expected = self.estimates[:, slots], self.expected[:, slots]
        acceptance.observe(slice(0, len(known)), slots, estimates, expected, known, matched)

    def forget(self, slot: int) -> None:
        """See `Cascade.forget`."""
        self.counts[:, slot] = 0
