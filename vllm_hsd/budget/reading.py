"""Whether a level that has not read a text yet reads it, to draft from then on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from vllm_hsd.budget.constants import ANSWERS


class Reading:
    """What a token of each request would have gained so far by levels' drafts.

    A level reads once for all tokens that are left, and a lookup's offer may be better in most
    steps: what its draft gains in the next one says little. So what counts is the mean over the
    tokens of a request of what it would have gained above no drafts and the levels that need not
    read, or read less and pay. A request begins with a token that gains nothing.

    Args:
        levels: that draft.
        num_slots: requests at the same time.

    Attributes:
        reads: bool [levels, num_slots], the last answer; of a new request that it does.
        answers: tokens of the last ones; clients seldom say how many they want.
    """

    def __init__(self, levels: int, num_slots: int) -> None:
        self.tokens, self.gained = np.ones((levels, num_slots)), np.zeros((levels, num_slots))
        self.reads = np.ones((levels, num_slots), dtype=bool)
        self.answers: deque[float] = deque(maxlen=ANSWERS)
        # Most tokens that were left before the first step of a request, and after its last one.
        self.first, self.last = np.zeros((2, num_slots))

    def forget(self, slot: int) -> None:
        """The slot has a new request."""
        if self.first[slot]:
            self.answers.append(self.first[slot] - self.last[slot])
        self.tokens[:, slot], self.gained[:, slot], self.reads[:, slot] = 1, 0, True
        self.first[slot] = 0

    def left(self, slots: np.ndarray, most: np.ndarray) -> np.ndarray:
        """[n] float64 tokens to come of requests that may get `most`, 1 at least.

        As many as answers had that were longer, in the mean; as many as have come if none was.
        """
        self.first[slots] = np.where(self.first[slots] > 0, self.first[slots], most)
        self.last[slots] = most
        age = self.first[slots] - most
        further = np.array(self.answers) - age[:, None]
        count = (further > 0).sum(1)
        mean = np.minimum(further, most[:, None]).sum(1, where=further > 0) / np.maximum(count, 1)
        found = np.where(count > 0, mean, age if self.answers else most)
        bounded: np.ndarray = np.minimum(np.maximum(found, 1.0), np.maximum(most, 1.0))
        return bounded

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
        own, tokens = np.array(worth).T
        # Of each request, the best of what it may be drafted by; no drafts first.
        best, every = np.full(len(slots), len(own) - 1), np.arange(len(slots))
        found = np.zeros_like(costs, dtype=bool)
        for level in costs.argsort(axis=0, kind="stable"):
            self.gained[level, slots] += tokens[best] * np.maximum(own[level] - own[best], 0.0)
            self.tokens[level, slots] += tokens[best]
            mean, cost = self.gained[level, slots] / self.tokens[level, slots], costs[level, every]
            found[level, every] = pays = (cost == 0) | (mean * left >= cost)
            best = np.where(pays & (own[level] > own[best]), level, best)
        self.reads[:, slots] = found
        self.last[slots] -= tokens[own.argmax()]
        return found
