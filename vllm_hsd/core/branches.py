"""Further drafts of a request beside its chain, which the target verifies in the same pass."""

from __future__ import annotations

import numpy as np


class BranchStore:
    """The branches of every slot: rows of point masses, `verify.branches` says what they are for.

    Args:
        num_slots: requests that can have a draft at the same time.
        rows: drafts of a request that the target verifies together, R, the chain included.
        length: longest draft, L.

    Attributes:
        token_ids: [num_slots, R - 1, L] int64, every row from the first drafted place on.
        counts: [num_slots, R - 1] int64 tokens of each row; 0: no row.
        source: [num_slots, R - 1] int64, of the first token of each row that no row before has.
        room: [num_slots] int64, most tokens of a row that can be verified; 0: the chain alone.
    """

    def __init__(self, num_slots: int, rows: int, length: int) -> None:
        self.token_ids = np.zeros((num_slots, rows - 1, length), dtype=np.int64)
        self.counts = np.zeros((num_slots, rows - 1), dtype=np.int64)
        self.source = np.zeros((num_slots, rows - 1), dtype=np.int64)
        self.room = np.full(num_slots, length)

    def clear(self, slots: np.ndarray | int) -> None:
        """Take the branches of `slots` away."""
        self.counts[slots] = 0
