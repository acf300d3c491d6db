"""Which KV blocks hold a level's own entries, where levels fill their caches late or never."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_hsd.core.drafts import ragged_arange
from vllm_hsd.runner_v1.request_state import RequestState


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
        """The target wrote positions starts[i] to ends[i]: blocks begun there hold nothing yet.

        Args:
            blocks: [n, width] block ids of each request, in the order of its positions.
            starts, ends: [n] int64.
        """
        first = -(-starts // self.block_size)
        owners, offsets = ragged_arange(np.maximum(-(-ends // self.block_size) - first, 0))
        self._reserve(blocks)
        self.filled[:, blocks[owners, first[owners] + offsets]] = False

    def fill(self, level: int, blocks: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """`level` computed positions starts[i] to ends[i] of each request: mark whole blocks."""
        first = starts // self.block_size
        owners, offsets = ragged_arange(np.maximum(ends // self.block_size - first, 0))
        self._reserve(blocks)
        self.filled[level, blocks[owners, first[owners] + offsets]] = True

    def usable(self, blocks: np.ndarray, length: int) -> np.ndarray:
        """[levels] int64 leading positions, of `length`, that each level has in blocks [width]."""
        count = -(-length // self.block_size)
        self._reserve(blocks)
        leading = np.logical_and.accumulate(self.filled[:, blocks[:count]], axis=1).sum(1)
        return np.minimum(leading * self.block_size, length)

    def _reserve(self, blocks: np.ndarray) -> None:
        missing = int(blocks.max(initial=0)) + 1 - self.filled.shape[1]
        if missing > 0:
            self.filled = np.pad(self.filled, ((0, 0), (0, missing)))


class LazyCaches:
    """Keeps the record of `FilledBlocks` for a runner whose levels need not compute every token.

    Args:
        runner: the GPUModelRunner (or CPUModelRunner) that hosts the target.
        requests: the state of its requests.
    """

    def __init__(self, runner: Any, requests: RequestState) -> None:
        self.runner, self.requests = runner, requests
        self.blocks: FilledBlocks | None = None

    def step_began(self, length: np.ndarray) -> None:
        """Take note of what the target has just computed: up to length[i] committed tokens."""
        computed = self.runner.input_batch.num_computed_tokens_cpu[: len(length)].astype(np.int64)
        self._filled().begin(self._block_ids(), computed, length)

    def step_ended(self, slots: np.ndarray) -> None:
        """Mark the blocks of `slots`, the whole batch in order, that levels have filled."""
        blocks, filled, requests = self._block_ids(), self._filled(), self.requests
        cached = np.minimum(requests.cached[:, slots], requests.committed[slots])
        # A text may have lost its rejected tokens.
        begun = np.minimum(requests.filled[:, slots], cached)
        for level, ends in enumerate(cached):
            filled.fill(level, blocks, begun[level], ends)
        requests.filled[:, slots] = cached

    def usable(self, request_id: str, computed: int) -> np.ndarray:
        """[levels] int64 entries of a prefix of `computed` tokens that each level really has."""
        row = self.runner.input_batch.req_id_to_index[request_id]
        return self._filled().usable(self._block_ids()[row], computed)

    def _block_ids(self) -> np.ndarray:
        """[batch, width] ids of the KV blocks of every request, in the first KV-cache group."""
        input_batch = self.runner.input_batch
        return input_batch.block_table[0].block_table.np[: input_batch.num_reqs]

    def _filled(self) -> FilledBlocks:
        # The size of a block is not known before the KV cache.
        if self.blocks is None:
            size = self.runner.input_batch.block_table[0].block_size
            self.blocks = FilledBlocks(len(self.requests.cached), size)
        return self.blocks
