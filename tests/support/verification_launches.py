"""What serving launches for other drafts: of vLLM's drafters, in branches, as trees."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_hsd.cascade import several_drafts
from vllm_hsd.cascade.level import Level, LevelOptions
from vllm_hsd.cascade.proposal_state import KVGroups
from vllm_hsd.cascade.schedule import compile_schedule
from vllm_hsd.kernels import branch_kernels
from vllm_hsd.kernels.blocks import padded_size
from vllm_hsd.kernels.branch_walk import follow_branches
from vllm_hsd.kernels.chain_verify import verify_chain_padded
from vllm_hsd.kernels.copy_blocks import (
    BranchRows,
    CacheBlocks,
    copy_from_winners,
    copy_to_branches,
)
from vllm_hsd.kernels.drawn_rows import verify_drawn_rows
from vllm_hsd.kernels.filter_rows import row_thresholds
from vllm_hsd.kernels.keep_rows import keep_rows
from vllm_hsd.kernels.sample_row import sample_row
from vllm_hsd.kernels.tree_verify import MAX_NODES, verify_tree

from . import meta_tensors as meta
from .kernel_launches import Cascade, MetaLevel, stage
from .meta_tensors import empty, filters, floats, longs, targets
from .proposal_states import state_of

_SLOTS, _LONGEST, _DRAFT = 256, 40960, 8


@dataclass(frozen=True)
class StockDrafter:
    """A drafter of vLLM's, with draft_sample_method "probabilistic"."""

    dtype: torch.dtype
    vocab_size: int = 151936

    def launch(self) -> None:
        """A draft step, of a token and of all, and the verification, of tokens without rows too."""
        kept = empty(_SLOTS, _DRAFT, self.vocab_size, dtype=self.dtype)
        kept_lse = floats(_SLOTS, _DRAFT)
        logits = empty(meta.BATCH, self.vocab_size, dtype=self.dtype)
        temperature, slots = floats(meta.BATCH), longs(meta.BATCH)
        index = longs(meta.BATCH)
        thresholds = row_thresholds(logits, floats(_SLOTS), filters(_SLOTS), index=index)
        inputs = temperature, longs(meta.BATCH), longs(meta.BATCH)
        _, lse = sample_row(logits, *inputs, thresholds=thresholds, positions=longs(meta.BATCH))
        for columns in (longs(), longs(meta.BATCH)):
            keep_rows(kept, kept_lse, logits, lse, temperature, thresholds, slots, columns)
        size = {"vocab_size": self.vocab_size, "slots": _SLOTS}
        cascade = Cascade((_DRAFT,), dtype=self.dtype, **size)
        for rows, lse in ((kept, kept_lse), (None, None)):
            cascade.verify(rows, _DRAFT, {"draft_lse": lse})


@dataclass(frozen=True)
class Branches:
    """Branches of lookups next to a chain of point masses, in caches of two block sizes."""

    rows: int = 4
    length: int = 8
    dtype: torch.dtype = torch.bfloat16
    vocab_size: int = 151936
    slots: int = 64

    def launch(self) -> None:
        """Launch what a step does with branches, from the list that is scheduled."""
        inputs = meta.BATCH * self.rows * (self.length + 1)
        count = meta.BATCH * self.rows
        rows = BranchRows(*(empty(count) for _ in range(3)), longs(count))
        tables, lanes = empty(count, 2560), padded_size(self.length + 1)
        sizes = {"BRANCHES": self.rows - 1, "LANES": lanes}
        counts, drafts = empty(self.slots, self.rows - 1), longs(meta.BATCH, self.length)
        flat = longs(self.slots, self.rows * (self.length + 1) - 1)
        for groups in (1, 2):
            branch_kernels.flat_drafts_kernel[(meta.BATCH,)](
                flat,
                flat.stride(0),
                drafts,
                empty(self.slots, self.rows - 1, self.length),
                counts,
                empty(meta.BATCH, 1 + self.length),
                1 + self.length,
                longs(meta.BATCH),
                empty(meta.BATCH),
                empty(groups),
                groups,
                40960,
                self.length,
                WINDOW=1,
                num_warps=1,
                **sizes,
            )
        laid_out = (longs(inputs), longs(inputs), tables, tables.stride(0), empty(self.slots))
        held, device = empty(self.slots, self.rows), empty(4, -(-count // 4) * 4)[:, :count]
        for first, size in ((True, 16), (False, 544)):
            branch_kernels.lay_out_kernel[(count,)](
                *laid_out,
                rows.chain,
                rows.base,
                held,
                *device,
                longs(meta.BATCH),
                empty(self.slots),
                counts,
                tables,
                tables.stride(0),
                size,
                self.length,
                FIRST=first,
                BLOCK=1024,
                **sizes,
            )
        caches = [CacheBlocks(longs(56, 3), size) for size in (32768, 8192)]
        for cache, block_size in zip(caches, (16, 544), strict=True):
            copy_to_branches(cache, rows, tables, block_size)
        target = empty(inputs, self.vocab_size, dtype=self.dtype)
        state = floats(self.slots), longs(self.slots), longs(self.slots)
        layout = empty(inputs), empty(meta.BATCH + 1), longs(meta.BATCH)
        chain = verify_chain_padded(
            target,
            None,
            *layout,
            *state,
            max_draft_tokens=self.length,
            draft_index=empty(meta.BATCH),
            draft_length=empty(self.slots),
            positions=longs(inputs),
        )
        for thresholds in (None, floats(inputs)):
            found = follow_branches(
                chain,
                target,
                *layout,
                *(empty(meta.BATCH, self.rows) for _ in range(2)),
                *state,
                max_tokens=self.length,
                thresholds=thresholds,
                positions=longs(inputs),
            )
        for cache, block_size in zip(caches, (16, 544), strict=True):
            followed = found.winner, found.num_emitted
            copy_from_winners(cache, rows, tables, block_size, *followed, self.length)


@dataclass(frozen=True)
class Trees:
    """Verification of draft trees, as several drawn drafts of a model are."""

    nodes: int = MAX_NODES
    dtype: torch.dtype = torch.bfloat16

    def launch(self) -> None:
        target = empty(meta.BATCH, self.nodes + 1, 151936, dtype=self.dtype)
        tree = longs(meta.BATCH, self.nodes)
        inputs = floats(meta.BATCH), longs(meta.BATCH), longs(meta.BATCH)
        verify_tree(target, target, tree, tree, *inputs)


@dataclass(frozen=True)
class SeveralDrafts:
    """A model that draws several drafts: the proposal, and the verification of sampled requests."""

    rows: int = 4
    length: int = 8
    dtype: torch.dtype = torch.bfloat16
    vocab_size: int = 151936

    def launch(self) -> None:
        schedule = compile_schedule([LevelOptions(self.length)], drafts=self.rows)
        kind = {"slots": _SLOTS, "device": "meta"}
        state = state_of(schedule, 8, self.vocab_size, self.dtype, **kind)
        kept = several_drafts.SeveralDrafts.allocate(state, self.rows, [2, 4, 8], most=4)
        bucket = state.bucket(4)
        stage(bucket, schedule, empty(_SLOTS, _LONGEST))
        groups = KVGroups(empty(1, dtype=torch.uint64), longs(1), empty(1))
        for drawn in (schedule, schedule.with_one_draft()):
            scheduled = drawn, [Level(MetaLevel(self.vocab_size))], groups, _LONGEST
            several_drafts.SeveralDraftsProgram(*scheduled, kept=kept).run(bucket)
        inputs = meta.BATCH * self.rows * (self.length + 1)
        for target, is_own in targets(inputs, self.vocab_size, self.dtype):
            for thresholds in (None, floats(inputs)) if is_own else (None,):
                chain = bucket.rows[0]
                assert chain is not None
                verify_drawn_rows(
                    target,
                    chain,
                    kept.rows,
                    empty(inputs),
                    empty(meta.BATCH + 1),
                    empty(meta.BATCH, self.rows),
                    empty(meta.BATCH),
                    *(floats(meta.BATCH) for _ in range(2)),
                    *(longs(meta.BATCH) for _ in range(2)),
                    thresholds=thresholds,
                )
