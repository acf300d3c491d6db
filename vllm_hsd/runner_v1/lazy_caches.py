"""The record of filled KV blocks of levels that fill their caches late or never."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_hsd.core.filled_blocks import FilledBlocks
from vllm_hsd.runner_v1.request_state import RequestState


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
