"""Which KV blocks hold a level's own entries, where levels fill their caches late or never."""

from __future__ import annotations

import numpy as np

from vllm_hsd.cascade.ragged import ragged_arange


class FilledBlocks:
    """Blocks of the KV cache that a level has filled, by level and block id.

    vLLM's prefix cache knows what the target has computed. A level that sat out has not: a request
    that hits a prefix may use the level's entries only up to the first block that it left out.

    Args:
        num_levels: levels of the cascade.
        block_size: tokens in a block.
    """

    def __init__(self, num_levels: int, block_size: int) -> None:
        self.block_size = block_size
        self.filled = np.zeros((num_levels, 0), dtype=bool)

    def begin(self, blocks: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """The target wrote positions starts[i] to ends[i]: no level has filled their blocks yet.

        Args:
            blocks: [n, width] block ids of each request, in the order of its positions.
            starts, ends: [n] int64.
        """
        # A session may go on inside a block, after the stop token of its last turn.
        first = starts // self.block_size
        owners, offsets = ragged_arange(np.maximum(-(-ends // self.block_size) - first, 0))
        self._reserve(blocks)
        self.filled[:, blocks[owners, first[owners] + offsets]] = False

    def fill(self, level: int, blocks: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """`level` computed positions starts[i] to ends[i] of each request: mark whole blocks."""
        first = starts // self.block_size
        owners, offsets = ragged_arange(np.maximum(ends // self.block_size - first, 0))
        self._reserve(blocks)
        self.filled[level, blocks[owners, first[owners] + offsets]] = True
        # vLLM's null block is no request's.
        self.filled[level, 0] = False

    def usable(self, blocks: np.ndarray, length: int) -> np.ndarray:
        """[levels] int64 leading positions, of `length`, that each level has in blocks [width]."""
        count = -(-length // self.block_size)
        self._reserve(blocks)
        leading = np.logical_and.accumulate(self.filled[:, blocks[:count]], axis=1).sum(1)
        usable: np.ndarray = np.minimum(leading * self.block_size, length)
        return usable

    def _reserve(self, blocks: np.ndarray) -> None:
        missing = int(blocks.max(initial=0)) + 1 - self.filled.shape[1]
        if missing > 0:
            self.filled = np.pad(self.filled, ((0, 0), (0, missing)))
