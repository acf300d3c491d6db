"""What levels have computed of each text, where the host knows and they read late: on a CPU.

A level reads a text when it drafts for it, all that it has missed in one pass. One that a step
leaves out computes nothing, prompts included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_hsd.cascade.filled_blocks import FilledBlocks
from vllm_hsd.cascade.ragged import ragged_arange


class LevelCaches:
    """How much of each text the levels have computed, and how they read the rest.

    Args:
        speculator: the cascade.
        levels: those that run forward passes in caches of their own, None for others.
        max_num_reqs: request slots.

    Attributes:
        keeps: any level has a cache of its own.
        hits: int64 [max_num_reqs], leading tokens whose blocks requests have found, and may share.
        computed: int64 [L, max_num_reqs] leading tokens with valid KV entries.
    """

    def __init__(self, speculator: Any, levels: list[Any], max_num_reqs: int) -> None:
        self.speculator, self.levels = speculator, levels
        self.own = [k for k, level in enumerate(levels) if level is not None]
        self.keeps = bool(self.own)
        self.computed = np.zeros((len(levels), max_num_reqs), dtype=np.int64)
        self.marked, self.hits = np.zeros_like(self.computed), np.zeros(max_num_reqs, np.int64)
        self.loads = speculator.vllm_config.kv_transfer_config is not None
        self.blocks = FilledBlocks(len(levels), speculator.block_tables.block_sizes[0])

    def step_began(self, input_batch: Any, entered: np.ndarray) -> None:
        """The target has computed a step: take note of requests that joined and of new blocks.

        Args:
            input_batch: vLLM's, of the step.
            entered: bool [max_num_reqs], slots whose requests are new, or resumed.
        """
        if not self.keeps:
            return
        count = input_batch.num_reqs
        slots = input_batch.idx_mapping_np[:count]
        starts = input_batch.num_computed_tokens_np[:count].astype(np.int64)
        table = self._table()
        # First: another request of the step may have hit a block that one of them was just given.
        self.blocks.begin(table[slots], starts, starts + input_batch.num_scheduled_tokens[:count])
        new = slots[entered[slots]]
        # What a connector loads holds nothing of levels, whatever its blocks held before.
        self.hits[new] = 0 if self.loads else starts[entered[slots]]
        self.computed[:, new] = self.marked[:, new] = 0
        self._take_filled(new)

    def committed(self, slots: np.ndarray, length: np.ndarray) -> None:
        """Forget what levels have computed after the texts, of [n] slots and tokens."""
        if not self.keeps:
            return
        self._take_filled(slots)
        computed = np.minimum(self.computed[:, slots], length - 1)
        self.computed[:, slots] = computed
        begun, table = np.minimum(self.marked[:, slots], computed), self._table()[slots]
        for k in self.own:
            self.blocks.fill(k, table, begun[k], computed[k])
        self.marked[:, slots] = computed

    def read(self, level: int, slots: np.ndarray, ends: np.ndarray) -> int:
        """Let a level compute the texts up to ends[i] tokens, [n] int64 each, or a part of them.

        In one step no more than vLLM's largest one has, or two: all requests wait for it.

        Returns:
            tokens that it has computed.
        """
        most, table, total = self.speculator.max_num_tokens, self._table()[slots], 0
        while True:
            self._take_filled(slots)
            begins = self.computed[level, slots]
            reads = np.flatnonzero(ends > begins)
            if not self.loads:
                # Of requests that share the block in which they go on, the one that had it first
                # reads it.
                reads = reads[np.argsort(self.hits[slots[reads]], kind="stable")]
                going_on = table[reads, begins[reads] // self.blocks.block_size]
                reads = reads[np.unique(going_on, return_index=True)[1]]
            if not len(reads) or total >= most:
                return total
            counts = np.cumsum(ends[reads] - begins[reads])
            counts = np.diff(np.minimum(counts, most), prepend=0)
            reads, counts = reads[counts > 0], counts[counts > 0]
            self._compute(level, slots[reads], begins[reads], counts)
            self.computed[level, slots[reads]] += counts
            total += int(counts.sum())
            self.blocks.fill(level, table[reads], begins[reads], begins[reads] + counts)

    def missed(self, level: int, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[n] tokens that `read` would compute; blocks that requests have found are shared out."""
        begins, size = self.computed[level, slots], self.blocks.block_size
        first = begins // size
        owners, offsets = ragged_arange(np.maximum(self.hits[slots] // size - first, 0))
        found = self._table()[slots[owners], first[owners] + offsets]
        _, place, counts = np.unique(found, return_inverse=True, return_counts=True)
        spared = np.bincount(owners, 1 - 1 / counts[place], minlength=len(slots))
        return np.maximum(ends - begins, 0) - spared * size

    def _take_filled(self, slots: np.ndarray) -> None:
        """What levels have read of blocks that requests share, also for another of them."""
        table = self._table()
        missed = self.computed[self.own][:, slots] < self.hits[slots]
        for slot in slots[missed.any(0)].tolist():
            usable = self.blocks.usable(table[slot], int(self.hits[slot]))
            np.maximum(self.computed[:, slot], usable, out=self.computed[:, slot])

    def _compute(
        self, level: int, slots: np.ndarray, begins: np.ndarray, counts: np.ndarray
    ) -> None:
        model = self.levels[level]
        model.compute(*pass_inputs(self.speculator, model.groups, slots, begins, counts))

    def _table(self) -> np.ndarray:
        """[max_num_reqs, width] ids of the KV blocks of every slot, in the first KV-cache group."""
        table: np.ndarray = self.speculator.block_tables.block_tables[0].gpu.numpy()
        return table


def pass_inputs(
    speculator: Any,
    groups: Any,
    slots: np.ndarray,
    begins: np.ndarray,
    counts: np.ndarray,
    ahead: int = 0,
) -> tuple[Any, ...]:
    """Arguments of `ProgramModel.compute` for places of texts.

    Args:
        speculator: the cascade.
        groups: of the model's attention.
        slots, begins, counts: [n] int64, requests, first places and their numbers.
        ahead: how far the tokens that are read are after their places.
    """
    # Programs run where no vLLM is installed.
    from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer

    owners, offsets = ragged_arange(counts)
    index = torch.from_numpy(slots.astype(np.int64))
    positions = torch.from_numpy(begins[owners] + offsets)
    text = speculator.req_states.all_token_ids.gpu
    input_ids = text[index[torch.from_numpy(owners)], positions + ahead].int()
    starts = torch.from_numpy(np.concatenate(([0], np.cumsum(counts)))).int()
    ends = torch.from_numpy(begins + counts).int()
    tables, total = speculator.block_tables, len(positions)
    slot_mappings = tables.compute_slot_mappings(
        index.int(),
        starts,
        positions,
        total,
        out=torch.empty(tables.num_kv_cache_groups, total, dtype=torch.int64),
    )
    metadata = build_attn_metadata(
        attn_groups=groups,
        num_reqs=len(slots),
        num_tokens=total,
        query_start_loc_gpu=starts,
        query_start_loc_cpu=starts,
        max_query_len=int(counts.max()),
        seq_lens=ends,
        max_seq_len=speculator.max_model_len,
        block_tables=[table.gpu[index] for table in tables.block_tables],
        slot_mappings=slot_mappings,
        kv_cache_config=speculator.kv_cache_config,
        seq_lens_cpu_upper_bound=ends,
        positions=positions,
        is_prefilling=torch.ones(len(slots), dtype=torch.bool),
    )
    mappings = build_slot_mappings_by_layer(slot_mappings, speculator.kv_cache_config)
    return input_ids, positions, metadata, mappings
