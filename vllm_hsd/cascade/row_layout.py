"""Where branches of a request have their blocks: behind all that its other levels may write.

A branch's row of the attention has the blocks of the request but for those from the root on; in
their place it has private ones, which lie in the same request's table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PrivateBlocks(NamedTuple):
    """Where branches have their blocks in a KV-cache group.

    Attributes:
        block_size: tokens of a block.
        length: longest draft.
    """

    block_size: int
    length: int

    @property
    def per_row(self) -> int:
        """Blocks of a branch.

        All that it can touch where blocks are small. Among large ones few drafts cross a boundary:
        a branch ends there, and does without the block behind it.
        """
        return -(-self.length // self.block_size) + (self.block_size < 8 * self.length)

    def lookahead(self, rows: int) -> int:
        """Tokens to reserve past those that the target computes, for `rows` drafts."""
        return self.length + (rows - 1) * self.per_row * self.block_size

    def first(self, base: np.ndarray, branch: np.ndarray | int) -> np.ndarray:
        """Index in its request's table of the first private block of a branch, from 1 on.

        It needs nothing but the root's position `base`, so drafting and computing agree on it.
        """
        return (base + self.length) // self.block_size + 1 + (branch - 1) * self.per_row
