"""Whether a level that has not read a text yet reads it, to draft from then on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_hsd.budget.goodput import MEMORY


class Reading:
    """What a token of each request would have gained so far by levels' drafts.

    A level reads once for all tokens that are left, and a lookup's offer may be better in most
    steps: what its draft gains in the next one says little. So what counts is the mean over the
    tokens of a request of what it would have gained above all other levels and no drafts. A request
    begins with a token that gains nothing.

    Args:
        levels: that draft.
        num_slots: requests at the same time.

    Attributes:
        reads: bool [levels, num_slots], the last answer; of a new request that it does.
        usual: tokens of an answer, exponentially forgotten; clients seldom say how many they want.
    """

    def __init__(self, levels: int, num_slots: int) -> None:
        self.tokens, self.gained = np.ones((levels, num_slots)), np.zeros((levels, num_slots))
        self.reads = np.ones((levels, num_slots), dtype=bool)
        self.usual = np.inf
        # Most tokens that were left when a request drafted first and last.
        self.first, self.last = np.zeros((2, num_slots))

    def forget(self, slot: int) -> None:
        """The slot has a new request."""
        if self.first[slot]:
            answer = max(self.first[slot] - self.last[slot], 1.0)
            known = self.usual if np.isfinite(self.usual) else answer
            self.usual = MEMORY * known + (1 - MEMORY) * answer
        self.tokens[:, slot], self.gained[:, slot], self.reads[:, slot] = 1, 0, True
        self.first[slot] = 0

    def left(self, slots: np.ndarray, most: np.ndarray) -> np.ndarray:
        """[n] float64 tokens to come of requests that may get `most`, 1 at least.

        Answers are taken to end at any token alike, so those to come are as many as at first.
        """
        self.first[slots] = np.where(self.first[slots] > 0, self.first[slots], most)
        self.last[slots] = most
        found: np.ndarray = np.clip(most, 1.0, max(self.usual, 1.0))
        return found

    def pays(
        self,
        slots: np.ndarray,
        worth: Sequence[tuple[float, float]],
        costs: np.ndarray,
        left: np.ndarray,
    ) -> np.ndarray:
        """bool [levels, n], which requests a level drafts for: it has missed nothing of them, or
        reading that is worth its cost.

        A step has passed.

        Args:
            slots: [n] int64 requests.
            worth: by level, and last of no drafts, what a token of these requests' next step is
                worth above the price of the step's time, in tokens, and how many the step gives.
            costs: [levels, n] of reading what it has missed, in tokens.
            left: [n] tokens to come.
        """
        for level, (own, _) in enumerate(worth[:-1]):
            other, tokens = max([*worth[:level], *worth[level + 1 :]])
            self.gained[level, slots] += tokens * max(own - other, 0.0)
            self.tokens[level, slots] += tokens
        mean = self.gained[:, slots] / self.tokens[:, slots]
        found: np.ndarray = (costs == 0) | (mean * left >= costs)
        self.reads[:, slots] = found
        return found
