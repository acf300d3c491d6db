"""What serving launches: proposals, their verification and the draws of vLLM's drafters.

Whole programs on meta tensors, so that no compile-time argument can be forgotten; see
`kernel_builds` for what becomes of the launches. Such tensors have no values: whatever reads one on
the host, or has a shape or a branch that depends on one, raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch

from vllm_hsd.budget.source_choice import Estimates, SourcesLookup
from vllm_hsd.cascade import cascade_steps, several_drafts
from vllm_hsd.cascade.entropy_stopping import DeviceThresholds, observe_target
from vllm_hsd.cascade.head_steps import HeadInputs, next_tokens, place_entry, read_step
from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.cascade.lookups import lookup_bigram, lookup_ngram
from vllm_hsd.cascade.ngram_rows import NgramRows, Runs
from vllm_hsd.cascade.prediction_lookup import PredictionLookup
from vllm_hsd.cascade.program import Program, ProgramSources
from vllm_hsd.cascade.proposal_state import KVGroups, ProposalState, row_dtypes
from vllm_hsd.cascade.schedule import Schedule, compile_schedule
from vllm_hsd.cascade.shared_outputs import SharedOutputs
from vllm_hsd.cascade.suffix_lookup import SuffixLookup
from vllm_hsd.cascade.text_order import OrderedTexts
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
from vllm_hsd.kernels.filter_rows import Filters, row_thresholds
from vllm_hsd.kernels.keep_rows import keep_rows
from vllm_hsd.kernels.sample_row import sample_row
from vllm_hsd.kernels.tree_verify import MAX_NODES, verify_tree

# Requests of a launch; the number changes nothing but the grid.
_BATCH = 3
# Of a model that draws several drafts.
_SLOTS, _LONGEST = 256, 40960


@dataclass(frozen=True)
class Cascade:
    """A cascade, and the engine that it runs in.

    Attributes:
        lengths: draft length of every level, cheapest first.
        horizontal_tokens: after the top level's draft.
        shorter: draft lengths in the same memory, for which the scheduler may ask; none.
        lowest: kind of level 0: "model", "ngram", "bigram", "suffix" or "sources".
        sources: lookups of "sources", these three in turn.
        chooses: a model is the last one of "sources".
        head: level 0 is a head of the target, or the last one of "sources" is.
        rows: drafts of a request that the target verifies together.
        store: tokens of a suffix level's store, 0 for none.
        shared: most tokens of its shared outputs, 0 for none.
        counted: levels that are n-gram models of the store.
        order: of these.
        exits: levels in the target's cache.
        unverified: levels that pass on what is below.
        unsure: levels whose drafts end by entropy.
        capacity: most requests of a proposal.
        groups: KV-cache groups.
        slots: max_num_seqs.
    """

    lengths: tuple[int, ...]
    lowest: str = "model"
    sources: int = 3
    chooses: bool = False
    head: bool = False
    rows: int = 1
    shorter: tuple[int, ...] = ()
    horizontal_tokens: int = 0
    store: int = 0
    shared: int = 0
    counted: tuple[int, ...] = ()
    order: int = 6
    exits: tuple[int, ...] = ()
    unverified: tuple[int, ...] = ()
    unsure: tuple[int, ...] = ()
    method: str = "block"
    vocab_size: int = 151936
    dtype: torch.dtype = torch.bfloat16
    capacity: int = 64
    groups: int = 1
    slots: int = 1024
    max_model_len: int = 40960

    def launch(self) -> None:
        """Launch what a step does: the proposal and the target's verification of it."""
        lookup = self.lowest != "model" and not self.chooses
        compiled = partial(
            compile_schedule,
            lookup=lookup,
            chooses=self.chooses,
            horizontal_tokens=self.horizontal_tokens,
        )
        schedule = compiled([LevelOptions(n) for n in self.lengths])
        state = ProposalState.allocate(
            schedule,
            batch=self.capacity,
            max_num_reqs=self.slots,
            vocab_size=self.vocab_size,
            dtypes=self._dtypes(lookup),
            num_kv_groups=self.groups,
            device=torch.device("meta"),
        )
        thresholds = None
        if self.unsure:
            stopping = [k in self.unsure for k in range(len(self.lengths))]
            thresholds = DeviceThresholds(stopping, state)
            batch = {"index": _empty(_BATCH), "num_sampled": _empty(_BATCH)}
            observe_target(thresholds, state, **batch, num_rejected=_empty(_BATCH))
        if self.shorter:
            schedule = compiled([LevelOptions(n) for n in self.shorter])
            state = state.shortened(schedule)
        bucket = state.bucket(min(self.capacity, 8))
        text = _empty(self.slots, self.max_model_len)
        _stage(bucket, schedule, text)
        numbers = range(len(self.lengths))
        levels: list[Any] = [_Level(self.vocab_size, k in self.exits) for k in numbers]
        for k in self.counted:
            levels[k] = self._ngram_rows()
            levels[k].text = text
        found, sources = self._lookup(), None
        if lookup:
            levels[0] = partial(found, text=text)
        elif self.chooses:
            sources = ProgramSources(partial(found.offer, text=text), found.choose, found.drawn)
        groups = KVGroups(
            _empty(self.groups, dtype=torch.uint64), _longs(self.groups), _empty(self.groups)
        )
        if self.head:
            levels[0] = _Head(self, schedule, groups, text)
        scheduled = schedule, levels, self._verifiers, groups, self.max_model_len
        Program(*scheduled, thresholds, sources).run(bucket)
        # The target verifies as many tokens as the longest drafts have.
        rows = state.rows[-1]
        drafts = {
            "draft_index": _empty(_BATCH),
            "draft_length": state.draft_length,
            "draft_lse": None if rows is None else state.lse[-1],
        }
        self.verify(rows, self.lengths[-1], drafts)

    @property
    def _verifiers(self) -> list[str]:
        numbers = range(len(self.lengths))
        return ["none" if k in self.unverified else self.method for k in numbers]

    def _dtypes(self, lookup: bool) -> list[torch.dtype | None]:
        kinds = ["counts" if k in self.counted else "model" for k in range(len(self.lengths))]
        kinds[0] = "lookup" if lookup else kinds[0]
        return row_dtypes(kinds, self._verifiers, self.horizontal_tokens, self.dtype)

    @property
    def _texts(self) -> OrderedTexts:
        return OrderedTexts(_empty(self.store + 4096), _empty(self.store))

    def _ngram_rows(self) -> NgramRows:
        places = _empty(self.order * self.store)
        runs = Runs(places, places.clone(), _empty(self.order + 1))
        return NgramRows(self._texts, runs, _floats(self.vocab_size))

    def _lookup(self) -> Any:
        meta, successor = torch.device("meta"), _empty(self.vocab_size)
        shared = None
        if self.shared:
            shared, text = SharedOutputs(self.shared, meta), _empty(self.slots, self.max_model_len)
            shared.add(_empty(_BATCH), _empty(_BATCH), _empty(self.slots), text)
        each = {
            "ngram": partial(lookup_ngram, shortest=1, longest=4),
            "suffix": SuffixLookup(self._texts if self.store else None, 0.05, meta, shared),
            "bigram": lambda state, text: lookup_bigram(state, successor),
            "prediction": PredictionLookup(self.slots, self.max_model_len, meta),
        }
        if self.lowest != "sources":
            return each.get(self.lowest)
        curve, table = (_empty(n, dtype=torch.float64) for n in (128, self.vocab_size))
        estimates = (Estimates(curve, False), None, Estimates(table, True), None)
        lookups = list(islice(cycle(zip(each.values(), estimates, strict=True)), self.sources))
        length = max(self.lengths[0], self.horizontal_tokens)
        size = {"rows": self.rows, "batch": self.capacity}
        return SourcesLookup(
            lookups, 0.05, self.slots, length, meta, has_drafter=self.chooses, **size
        )

    def verify(self, rows: torch.Tensor | None, longest: int, drafts: dict) -> None:
        """Launch the target's verification of drafts, and of none."""
        for most, logits in ((longest, rows), (0, None)):
            count = _BATCH * (most + 1)
            for target, is_own in _targets(count, self.vocab_size, self.dtype):
                temperature = _floats(self.slots)
                thresholds: list[torch.Tensor | None] = [None]
                if is_own:
                    filters, index = _filters(self.slots), _longs(count)
                    thresholds.append(row_thresholds(target, temperature, filters, index=index))
                for values in thresholds:
                    verify_chain_padded(
                        target if is_own else target.contiguous(),
                        logits,
                        _empty(count) if most else _longs(count),
                        _empty(_BATCH + 1),
                        _longs(_BATCH),
                        temperature,
                        _longs(self.slots),
                        _longs(self.slots),
                        max_draft_tokens=most,
                        level=len(self.lengths),
                        method=self.method,
                        draft_temperature=_floats(self.slots),
                        thresholds=values,
                        positions=_longs(count),
                        **drafts,
                    )


class _Level:
    """Logits of a level that computes nothing."""

    def __init__(self, vocab_size: int, in_target_cache: bool = False) -> None:
        self.vocab_size, self.in_target_cache = vocab_size, in_target_cache

    def forward(self, state, op, num_logits: int) -> torch.Tensor:
        dtype = state.rows[op.level].dtype
        return _empty(state.batch * num_logits, self.vocab_size, dtype=dtype)


class _Head(_Level):
    """A head that has read a step of the target."""

    def __init__(self, cascade: Cascade, schedule, groups: KVGroups, text: torch.Tensor) -> None:
        super().__init__(cascade.vocab_size)
        self.scheduled = schedule, groups, cascade.max_model_len
        length = schedule.num_speculative_tokens + 1
        self.inputs = HeadInputs.allocate(
            schedule,
            batch=cascade.capacity,
            query_length=length,
            hidden_size=64,
            dtype=cascade.dtype,
            device=torch.device("meta"),
        )
        self.inputs.set_kv_groups(cascade.groups)
        step = {
            "index": _longs(_BATCH),
            "query_start_loc": _empty(_BATCH + 1),
            "positions": _longs(_BATCH * length),
            "text": text,
            "length": _empty(cascade.slots),
        }
        next_tokens(_empty(_BATCH * length), **step, longest=length)
        read_step(self.inputs, groups, cascade.max_model_len, **step)

    def forward(self, state, op, num_logits: int) -> torch.Tensor:
        schedule, *caches = self.scheduled
        if op.draw > 0:
            place_entry(self.inputs, state, schedule, op.query_length - 1, *caches)
        return super().forward(state, op, num_logits)


@dataclass(frozen=True)
class StockDrafter:
    """A drafter of vLLM's, with draft_sample_method "probabilistic"."""

    dtype: torch.dtype
    vocab_size: int = 151936
    draft_length: int = 8
    slots: int = 256

    def launch(self) -> None:
        """Launch a draft step, of one token and of all at once, and the verification.

        Also of tokens without rows, as the same drafter keeps none that drafts its argmax.
        """
        kept = _empty(self.slots, self.draft_length, self.vocab_size, dtype=self.dtype)
        kept_lse = _floats(self.slots, self.draft_length)
        logits = _empty(_BATCH, self.vocab_size, dtype=self.dtype)
        temperature, slots = _floats(_BATCH), _longs(_BATCH)
        thresholds = row_thresholds(
            logits, _floats(self.slots), _filters(self.slots), index=_longs(_BATCH)
        )
        inputs = temperature, _longs(_BATCH), _longs(_BATCH)
        _, lse = sample_row(logits, *inputs, thresholds=thresholds, positions=_longs(_BATCH))
        for columns in (_longs(), _longs(_BATCH)):
            keep_rows(kept, kept_lse, logits, lse, temperature, thresholds, slots, columns)
        cascade = Cascade(
            (self.draft_length,), dtype=self.dtype, vocab_size=self.vocab_size, slots=self.slots
        )
        for rows, lse in ((kept, kept_lse), (None, None)):
            cascade.verify(rows, self.draft_length, {"draft_lse": lse})


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
        inputs = _BATCH * self.rows * (self.length + 1)
        count = _BATCH * self.rows
        rows = BranchRows(*(_empty(count) for _ in range(3)), _longs(count))
        tables, lanes = _empty(count, 2560), padded_size(self.length + 1)
        sizes = {"BRANCHES": self.rows - 1, "LANES": lanes}
        counts, drafts = _empty(self.slots, self.rows - 1), _longs(_BATCH, self.length)
        flat = _longs(self.slots, self.rows * (self.length + 1) - 1)
        for groups in (1, 2):
            branch_kernels.flat_drafts_kernel[(_BATCH,)](
                flat,
                flat.stride(0),
                drafts,
                _empty(self.slots, self.rows - 1, self.length),
                counts,
                _empty(_BATCH, 1 + self.length),
                1 + self.length,
                _longs(_BATCH),
                _empty(_BATCH),
                _empty(groups),
                groups,
                40960,
                self.length,
                WINDOW=1,
                num_warps=1,
                **sizes,
            )
        laid_out = (_longs(inputs), _longs(inputs), tables, tables.stride(0), _empty(self.slots))
        held, device = _empty(self.slots, self.rows), _empty(4, -(-count // 4) * 4)[:, :count]
        for first, size in ((True, 16), (False, 544)):
            branch_kernels.lay_out_kernel[(count,)](
                *laid_out,
                rows.chain,
                rows.base,
                held,
                *device,
                _longs(_BATCH),
                _empty(self.slots),
                counts,
                tables,
                tables.stride(0),
                size,
                self.length,
                FIRST=first,
                BLOCK=1024,
                **sizes,
            )
        caches = [CacheBlocks(_longs(56, 3), size) for size in (32768, 8192)]
        for cache, block_size in zip(caches, (16, 544), strict=True):
            copy_to_branches(cache, rows, tables, block_size)
        target = _empty(inputs, self.vocab_size, dtype=self.dtype)
        state = _floats(self.slots), _longs(self.slots), _longs(self.slots)
        layout = _empty(inputs), _empty(_BATCH + 1), _longs(_BATCH)
        chain = verify_chain_padded(
            target,
            None,
            *layout,
            *state,
            max_draft_tokens=self.length,
            draft_index=_empty(_BATCH),
            draft_length=_empty(self.slots),
            positions=_longs(inputs),
        )
        for thresholds in (None, _floats(inputs)):
            found = follow_branches(
                chain,
                target,
                *layout,
                *(_empty(_BATCH, self.rows) for _ in range(2)),
                *state,
                max_tokens=self.length,
                thresholds=thresholds,
                positions=_longs(inputs),
            )
        for cache, block_size in zip(caches, (16, 544), strict=True):
            followed = found.winner, found.num_emitted
            copy_from_winners(cache, rows, tables, block_size, *followed, self.length)


@dataclass(frozen=True)
class Trees:
    """Verification of draft trees, as several drawn drafts of a model are."""

    nodes: int = MAX_NODES
    dtype: torch.dtype = torch.bfloat16
    vocab_size: int = 151936

    def launch(self) -> None:
        """Launch it for rows, drawn with and without replacement, and for point masses."""
        target = _empty(_BATCH, self.nodes + 1, self.vocab_size, dtype=self.dtype)
        tree = _longs(_BATCH, self.nodes)
        for rows, replacement in ((target, True), (target, False), (None, True)):
            inputs = _floats(_BATCH), _longs(_BATCH), _longs(_BATCH)
            verify_tree(target, rows, tree, tree, *inputs, replacement=replacement)


@dataclass(frozen=True)
class SeveralDrafts:
    """A model that draws several drafts: the proposal, and the verification of sampled requests."""

    rows: int = 4
    length: int = 8
    dtype: torch.dtype = torch.bfloat16
    vocab_size: int = 151936

    def launch(self) -> None:
        """Launch what a step does."""
        schedule = compile_schedule([LevelOptions(self.length)], drafts=self.rows)
        state = ProposalState.allocate(
            schedule,
            batch=8,
            max_num_reqs=_SLOTS,
            vocab_size=self.vocab_size,
            dtypes=[self.dtype],
            num_kv_groups=1,
            device=torch.device("meta"),
        )
        kept = several_drafts.SeveralDrafts.allocate(state, self.rows, [2, 4, 8], most=4)
        bucket = state.bucket(4)
        _stage(bucket, schedule, _empty(_SLOTS, _LONGEST))
        groups = KVGroups(_empty(1, dtype=torch.uint64), _longs(1), _empty(1))
        for drawn in (schedule, schedule.with_one_draft()):
            scheduled = drawn, [_Level(self.vocab_size)], ["block"], groups, _LONGEST
            several_drafts.SeveralDraftsProgram(*scheduled, kept=kept).run(bucket)
        inputs = _BATCH * self.rows * (self.length + 1)
        for target, is_own in _targets(inputs, self.vocab_size, self.dtype):
            for thresholds in (None, _floats(inputs)) if is_own else (None,):
                chain = bucket.rows[0]
                assert chain is not None
                verify_drawn_rows(
                    target,
                    chain,
                    kept.rows,
                    _empty(inputs),
                    _empty(_BATCH + 1),
                    _empty(_BATCH, self.rows),
                    _empty(_BATCH),
                    *(_floats(_BATCH) for _ in range(2)),
                    *(_longs(_BATCH) for _ in range(2)),
                    thresholds=thresholds,
                )


def _stage(state: ProposalState, schedule: Schedule, text: torch.Tensor) -> None:
    """Stage requests of [slots, longest] tokens."""
    slots, longest = text.shape
    cascade_steps.stage(
        state,
        schedule,
        index=_empty(_BATCH),
        text=text,
        length=_empty(slots),
        num_sampled=_empty(_BATCH),
        temperature=_floats(slots),
        **_filters(slots)._asdict(),
        seeds=_longs(slots),
        most_drafted=_empty(slots),
        scales=_floats(schedule.num_levels),
        max_model_len=longest,
    )


def _targets(rows: int, vocab_size: int, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, bool]]:
    """A target's logits [rows, V], and whether they are the model's own.

    Of the model; of a padded head; with all sampling parameters applied.
    """
    padded = -(-vocab_size // 64) * 64
    for own, width in ((dtype, vocab_size), (dtype, padded), (None, padded)):
        logits = _empty(rows, width, dtype=own or torch.float32)
        yield logits[:, :vocab_size], own is not None


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _longs(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.int64)


def _filters(requests: int) -> Filters:
    return Filters(_empty(requests), _floats(requests), _floats(requests))


def _floats(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.float32)
