"""What a head has not read of the target's steps, where it reads when it drafts: on a CPU."""

from __future__ import annotations

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
        self.parts: list[list[torch.Tensor]] = [[] for _ in range(max_num_reqs)]

    def restart(self, slot: int, first: int) -> None:
        """All before a position is read, and nothing is kept."""
        self.parts[slot].clear()
        self.first[slot], self.count[slot] = first, 0

    def keep(self, slot: int, states: torch.Tensor) -> None:
        """Add states [n, width] of the next positions.

        All but the last MOST are lost: entries of the head that are never filled.
        """
        parts = self.parts[slot]
        parts.append(states[-MOST:].clone())
        dropped = max(len(states) - MOST, 0)
        self.first[slot] += dropped
        self.count[slot] += len(states) - dropped
        while (lost := self.count[slot] - MOST) > 0:
            lost = min(lost, len(parts[0]))
            parts[0] = parts[0][lost:]
            if not len(parts[0]):
                del parts[0]
            self.first[slot] += lost
            self.count[slot] -= lost

    def take(self, slots: np.ndarray) -> torch.Tensor:
        """[n, width] all that is kept of requests, one after another; it counts as read."""
        taken = torch.cat([part for slot in slots for part in self.parts[slot]])
        for slot in slots:
            self.restart(slot, self.first[slot] + self.count[slot])
        return taken
