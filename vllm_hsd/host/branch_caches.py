"""Copies in KV caches: of the block that holds the root to branches, and of winners back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_hsd.errors import UserError
from vllm_hsd.kernels.copy_blocks import (
    BranchRows,
    CacheBlocks,
    copy_from_winners,
    copy_to_branches,
)

OTHER_LAYOUT = (
    "levels[0].branches does not run with the KV-cache layout that vLLM chose: remove branches."
)


class BranchCaches:
    """Copies between the blocks of a request's text and those of its branches.

    Args:
        runner: vLLM's; its caches are looked up when a step needs them.

    Attributes:
        groups: caches by KV-cache group; empty before they are looked up.
    """

    def __init__(self, runner: Any) -> None:
        self.runner, self.groups = runner, list[CacheBlocks]()

    def forget(self) -> None:
        """The caches have been made anew."""
        self.groups = []

    def begin(self, group: int, rows: BranchRows, table: torch.Tensor) -> None:
        """Copy the blocks that hold the roots of `rows` to those of a group's table."""
        size = self.runner.block_tables.block_sizes[group]
        copy_to_branches(self._found()[group], rows, table, size)

    def finish(
        self,
        rows: BranchRows,
        tables: Sequence[torch.Tensor],
        winner: torch.Tensor,
        emitted: torch.Tensor,
        length: int,
    ) -> None:
        """Copy what the winning branches computed to where the text is.

        Args:
            rows: of the step.
            tables: by KV-cache group, int32 [rows, width].
            winner, emitted: int32 [B], the row that holds a request's text, and its new tokens.
            length: most tokens of a row after its root.
        """
        sizes = self.runner.block_tables.block_sizes
        for cache, table, size in zip(self._found(), tables, sizes, strict=True):
            copy_from_winners(cache, rows, table, size, winner, emitted, length)

    def _found(self) -> list[CacheBlocks]:
        if self.groups:
            return self.groups
        runner, config = self.runner, self.runner.kv_cache_config
        layers = runner.compilation_config.static_forward_context
        sizes, number = runner.block_tables.block_sizes, config.num_blocks
        for group, size in zip(config.kv_cache_groups, sizes, strict=True):
            # Layers may share a cache.
            each = [layers[name].kv_cache for name in group.layer_names]
            each = list({kv.data_ptr(): kv for kv in each}.values())
            known = size == runner.cache_config.block_size
            if not known or any(number not in kv.shape for kv in each):
                raise UserError(OTHER_LAYOUT)
            moved = (kv.movedim(kv.shape.index(number), 0) for kv in each)
            self.groups.append(CacheBlocks.of(moved))
        return self.groups
