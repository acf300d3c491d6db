"""What a head has not read of the target's steps, where it reads when it drafts: on a CPU."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

# Most states of a request that are kept.
MOST = 256


class UnreadStates:
    """The target's states by request, from the first one on that its head has not read.

    Args:
        max_num_reqs: request slots.

    Attributes:
        first, count: int64 [max_num_reqs], position of the first one, and how many there are.
    """

    def __init__(self, max_num_reqs: int) -> None:
        self.first, self.count = np.zeros((2, max_num_reqs), dtype=np.int64)
        # [width] each, the oldest first.
        self.kept = [deque[torch.Tensor](maxlen=MOST) for _ in range(max_num_reqs)]

    def restart(self, slot: int, first: int) -> None:
        """All before a position is read, and nothing is kept."""
        self.kept[slot].clear()
        self.first[slot], self.count[slot] = first, 0

    def keep(self, slot: int, states: torch.Tensor) -> None:
        """Add states [n, width] of the next positions.

        All but the last MOST are lost: entries of the head that are never filled.
        """
        kept, end = self.kept[slot], self.first[slot] + self.count[slot] + len(states)
        kept.extend(states[-MOST:].clone().unbind())
        self.first[slot], self.count[slot] = end - len(kept), len(kept)

    def take(self, slots: np.ndarray) -> torch.Tensor:
        """[n, width] all that is kept of requests, one after another; it counts as read."""
        taken = torch.stack([state for slot in slots for state in self.kept[slot]])
        for slot in slots:
            self.restart(slot, self.first[slot] + self.count[slot])
        return taken
