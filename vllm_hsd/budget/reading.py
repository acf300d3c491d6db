"""Whether a level that has not read a text yet reads it, to draft from then on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Reading:
    """What levels' drafts would have gained in each request so far.

    A level reads once for all steps that are left, and a lookup's offer may be better in most of
    them: what its draft gains in the next step says little. So what counts is the mean over the
    steps of these requests of what it would have gained above all other levels. A request begins
    with a step that gains nothing.

    Args:
        levels: that draft.
        num_slots: requests at the same time.
    """

    def __init__(self, levels: int, num_slots: int) -> None:
        self.steps, self.gained = np.ones(num_slots), np.zeros((levels, num_slots))

    def forget(self, slot: int) -> None:
        """The slot has a new request."""
        self.steps[slot], self.gained[:, slot] = 1, 0

    def pays(
        self, slots: np.ndarray, gains: Sequence[float], costs: Sequence[float], left: float
    ) -> list[bool]:
        """By level, whether it drafts: it has missed nothing, or reading that is worth its cost.

        A step has passed.

        Args:
            slots: [n] int64 requests.
            gains: by level, of all these requests' next step if it drafts, in tokens.
            costs: by level, of reading what it has missed, in tokens.
            left: steps that these requests will still take, in the mean.
        """
        self.steps[slots] += 1
        found = []
        for level, gain in enumerate(gains):
            others = max([0.0, *gains[:level], *gains[level + 1 :]])
            self.gained[level, slots] += max(gain - others, 0.0) / len(slots)
            mean = float((self.gained[level, slots] / self.steps[slots]).sum())
            found.append(not costs[level] or mean * left >= costs[level])
        return found
