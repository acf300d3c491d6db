"""Several lookups in the place of one: what `budget.source_choice` does on a device, in NumPy.

The kernels of `kernels/source_kernels.py` and this choose the same offers and learn the same
(`tests/kernels/test_sources.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_hsd.budget.acceptance import AcceptanceEstimates
from vllm_hsd.cascade.level import LookupResult
from vllm_hsd.tools.lookup_level import LookupLevel, Texts

# Most tokens of a draft.
_LONGEST = 128


class LookupChoice(LookupLevel):
    """Drafts the offer that is expected to give most tokens, by what became of earlier offers.

    Every offer is compared with the text that follows it, whether it was drafted or not.

    Args:
        lookups: S of them.
        min_acceptance: a draft ends before the token that is less likely to be accepted.
        num_slots: requests at the same time.

    Attributes:
        acceptance: one drafter for each lookup.
        counts: int64 [S, slots], tokens of the last offers, 0 where the text has gone on.
        token_ids, estimates, expected: [S, slots, n], of the last offers: tokens, the lookups' own
            acceptance probability of each token after the ones before, and that corrected.
        starts: int64 [slots], positions at which they begin.
    """

    def __init__(
        self, lookups: Sequence[LookupLevel], min_acceptance: float, num_slots: int = 1
    ) -> None:
        self.lookups, self.min_acceptance = list(lookups), min_acceptance
        shape = len(self.lookups), num_slots, _LONGEST
        self.acceptance = AcceptanceEstimates(shape[0], num_slots)
        self.counts = np.zeros(shape[:2], dtype=np.int64)
        self.token_ids = np.zeros(shape, dtype=np.int64)
        self.estimates, self.expected = np.zeros((2, *shape))
        self.starts = np.zeros(num_slots, dtype=np.int64)

    def fresh(self) -> LookupChoice:
        """The same, before anything was learned, for as many requests."""
        return LookupChoice(self.lookups, self.min_acceptance, len(self.starts))

    def read(self, texts: Texts) -> None:
        for lookup in self.lookups:
            lookup.read(texts)

    def forget(self, slot: int) -> None:
        """The slot has a new request: what was learned of the old one alone is forgotten."""
        for lookup in self.lookups:
            lookup.forget(slot)
        self.acceptance.forget(slot)
        self.counts[:, slot] = 0

    def lookup(self, texts: Texts, requested: np.ndarray) -> LookupResult:
        """Continue each text by the best offer, at most requested[i] tokens."""
        self._judge(texts)
        slots, width = texts.slots, int(requested.max(initial=0))
        self.starts[slots] = texts.ends
        for source, lookup in enumerate(self.lookups):
            found, place = lookup.lookup(texts, requested), (source, slots, slice(0, width))
            self.counts[source, slots] = found.counts
            self.token_ids[place], self.estimates[place] = found.token_ids, found.estimates
            self.expected[place] = self.acceptance.corrected(
                source, found.estimates, np.arange(width)
            )
        return self.best(slots, self.counts[:, slots], requested)[1]

    def best(
        self, slots: np.ndarray, counts: np.ndarray, requested: np.ndarray
    ) -> tuple[np.ndarray, LookupResult]:
        """The best of the last offers in [n] slots, had they counts[s, i] tokens.

        Returns:
            (int64 [n] lookups, -1 for none; what is drafted).
        """
        width, own = int(requested.max(initial=0)), np.arange(len(slots))
        scale = np.stack([self.acceptance.scale(s, slots) for s in range(len(self.lookups))])
        each = np.minimum(self.expected[:, slots, :width] * scale[..., None], 1.0)
        survival = np.cumprod(each, axis=2)
        survival *= np.arange(width) < np.minimum(counts, requested)[..., None]
        survival[survival < self.min_acceptance] = 0.0
        # Of equals the last one.
        source = len(self.lookups) - 1 - survival.sum(2)[::-1].argmax(0)
        chosen = survival[source, own]
        drafted, token_ids = (chosen > 0).sum(1), self.token_ids[source, slots, :width]
        return np.where(drafted > 0, source, -1), LookupResult(token_ids, drafted, chosen)

    def _judge(self, texts: Texts) -> None:
        """Compare the last offers with the texts as they are now."""
        tokens, rows, slots, ends = texts
        # A text that ends where the offer began or before has changed before the offer.
        known = np.clip(ends - self.starts[slots], 0, self.counts[:, slots])
        self.counts[:, slots] = 0
        place = np.arange(_LONGEST)
        at = np.minimum(self.starts[slots, None] + place, tokens.shape[1] - 1)
        same = (tokens[rows[:, None], at] == self.token_ids[:, slots]) & (place < known[..., None])
        matched = np.logical_and.accumulate(same, axis=2).sum(2)
        for source in range(len(self.lookups)):
            offered = self.estimates[source, slots], self.expected[source, slots]
            self.acceptance.observe(source, slots, *offered, known[source], matched[source])
