"""What serving launches for a cascade: a proposal, and the target's verification of it.

Whole programs on meta tensors, so that no compile-time argument can be forgotten, and whatever
reads a value on the host raises; see `kernel_builds` for what becomes of the launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch

from vllm_hsd.budget.source_choice import Estimates, SourcesLookup
from vllm_hsd.cascade import cascade_steps
from vllm_hsd.cascade.bigram_rows import BigramRows
from vllm_hsd.cascade.entropy_stopping import DeviceThresholds, observe_target
from vllm_hsd.cascade.head_steps import HeadInputs, next_tokens, place_entry, read_step
from vllm_hsd.cascade.level import Level, LevelOptions
from vllm_hsd.cascade.lookups import lookup_bigram, lookup_ngram
from vllm_hsd.cascade.prediction_lookup import PredictionLookup
from vllm_hsd.cascade.program import Program, ProgramSources
from vllm_hsd.cascade.proposal_state import KVGroups, ProposalState
from vllm_hsd.cascade.schedule import Schedule, compile_schedule
from vllm_hsd.cascade.shared_outputs import SharedOutputs
from vllm_hsd.cascade.suffix_lookup import SuffixLookup
from vllm_hsd.cascade.text_order import OrderedTexts
from vllm_hsd.kernels.chain_verify import verify_chain_padded
from vllm_hsd.kernels.filter_rows import row_thresholds

from . import meta_tensors as meta
from .meta_tensors import empty, filters, floats, longs, targets
from .proposal_states import state_of


@dataclass(frozen=True)
class Cascade:
    """A cascade, and the engine that it runs in."""

    lengths: tuple[int, ...]  # of every level's drafts, cheapest first
    lowest: str = "model"  # kind of level 0: or "ngram", "bigram", "suffix", "sources", ...
    sources: int = 3  # lookups of "sources", all kinds in turn
    chooses: bool = False  # a model is the last one of "sources"
    head: bool = False  # level 0 is a head of the target, or the last one of "sources" is
    rows: int = 1  # drafts of a request that the target verifies together
    shorter: tuple[int, ...] = ()  # draft lengths in the same memory, which the scheduler chooses
    horizontal_tokens: int = 0
    store: int = 0  # tokens of a suffix level's store
    shared: int = 0  # most tokens of its shared outputs
    counted: tuple[int, ...] = ()  # levels that are bigram models
    exits: tuple[int, ...] = ()  # levels in the target's cache
    unverified: tuple[int, ...] = ()  # levels that pass on what is below
    unsure: tuple[int, ...] = ()  # levels whose drafts end by entropy
    method: str = "block"
    vocab_size: int = 151936
    dtype: torch.dtype = torch.bfloat16
    capacity: int = 64  # most requests of a proposal
    groups: int = 1  # of the KV cache
    slots: int = 1024  # max_num_seqs
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
        kind = {"lookup": lookup, "slots": self.slots, "groups": self.groups, "device": "meta"}
        state = state_of(schedule, self.capacity, self.vocab_size, self.dtype, **kind)
        thresholds = None
        if self.unsure:
            stopping = [k in self.unsure for k in range(len(self.lengths))]
            thresholds = DeviceThresholds(stopping, state)
            batch = {"index": empty(meta.BATCH), "num_sampled": empty(meta.BATCH)}
            observe_target(thresholds, state, **batch, num_rejected=empty(meta.BATCH))
        if self.shorter:
            schedule = compiled([LevelOptions(n) for n in self.shorter])
            state = state.shortened(schedule)
        bucket = state.bucket(min(self.capacity, meta.BATCH))
        text = empty(self.slots, self.max_model_len)
        stage(bucket, schedule, text)
        numbers = range(len(self.lengths))
        levels: list[Any] = [MetaLevel(self.vocab_size, k in self.exits) for k in numbers]
        for k in self.counted:
            pairs = empty(self.vocab_size + 1), empty(4096), empty(4096), empty(self.vocab_size)
            levels[k] = BigramRows((*pairs, floats(self.vocab_size)), self.dtype)
        found, sources = self._lookup(), None
        if lookup:
            levels[0] = partial(found, text=text)
        elif self.chooses:
            offer = partial(found.offer, text=text)
            of_drafter = found.prefers_drafter, found.drafter_selected
            sources = ProgramSources(offer, found.choose, found.drawn, *of_drafter)
        groups = KVGroups(
            empty(self.groups, dtype=torch.uint64), longs(self.groups), empty(self.groups)
        )
        if self.head:
            levels[0] = _Head(self, schedule, groups, text)
        verifiers = ["none" if k in self.unverified else self.method for k in numbers]
        run = list(map(Level, levels, verifiers))
        Program(schedule, run, groups, self.max_model_len, thresholds, sources).run(bucket)
        # The target verifies as many tokens as the longest drafts have.
        rows = state.rows[-1]
        drafts = {
            "draft_index": empty(meta.BATCH),
            "draft_length": state.draft_length,
            "draft_lse": None if rows is None else state.lse[-1],
        }
        self.verify(rows, self.lengths[-1], drafts)

    def _lookup(self) -> Any:
        device, successor = torch.device("meta"), empty(self.vocab_size)
        texts = OrderedTexts(empty(self.store + 4096), empty(self.store)) if self.store else None
        shared = None
        if self.shared:
            shared, text = SharedOutputs(self.shared, device), empty(self.slots, self.max_model_len)
            shared.add(empty(meta.BATCH), empty(meta.BATCH), empty(self.slots), text)
        each = {
            "ngram": partial(lookup_ngram, shortest=1, longest=4),
            "suffix": SuffixLookup(texts, 0.05, device, shared),
            "bigram": lambda state, text: lookup_bigram(state, successor),
            "prediction": PredictionLookup(self.slots, self.max_model_len, device),
        }
        if self.lowest != "sources":
            return each.get(self.lowest)
        curve, table = (empty(n, dtype=torch.float64) for n in (128, self.vocab_size))
        estimates = (Estimates(curve, False), None, Estimates(table, True), None)
        lookups = list(islice(cycle(zip(each.values(), estimates, strict=True)), self.sources))
        length = max(self.lengths[0], self.horizontal_tokens)
        size = {"rows": self.rows, "batch": self.capacity}
        return SourcesLookup(
            lookups, 0.05, self.slots, length, device, has_drafter=self.chooses, **size
        )

    def verify(self, rows: torch.Tensor | None, longest: int, drafts: dict) -> None:
        """Launch the target's verification of drafts, and of none."""
        for most, logits in ((longest, rows), (0, None)):
            count = meta.BATCH * (most + 1)
            for target, is_own in targets(count, self.vocab_size, self.dtype):
                temperature = floats(self.slots)
                thresholds: list[torch.Tensor | None] = [None]
                if is_own:
                    filtered, index = filters(self.slots), longs(count)
                    thresholds.append(row_thresholds(target, temperature, filtered, index=index))
                for values in thresholds:
                    verify_chain_padded(
                        target if is_own else target.contiguous(),
                        logits,
                        empty(count) if most else longs(count),
                        empty(meta.BATCH + 1),
                        longs(meta.BATCH),
                        temperature,
                        longs(self.slots),
                        longs(self.slots),
                        max_draft_tokens=most,
                        level=len(self.lengths),
                        method=self.method,
                        draft_temperature=floats(self.slots),
                        thresholds=values,
                        positions=longs(count),
                        **drafts,
                    )


class MetaLevel:
    """Logits of a level that computes nothing."""

    def __init__(self, vocab_size: int, in_target_cache: bool = False) -> None:
        self.vocab_size, self.in_target_cache = vocab_size, in_target_cache

    def forward(self, state, op, num_logits: int) -> torch.Tensor:
        dtype = state.rows[op.level].dtype
        return empty(state.batch * num_logits, self.vocab_size, dtype=dtype)


class _Head(MetaLevel):
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
            "index": longs(meta.BATCH),
            "query_start_loc": empty(meta.BATCH + 1),
            "positions": longs(meta.BATCH * length),
            "text": text,
            "length": empty(cascade.slots),
        }
        next_tokens(empty(meta.BATCH * length), **step, longest=length)
        read_step(self.inputs, groups, cascade.max_model_len, **step)

    def forward(self, state, op, num_logits: int) -> torch.Tensor:
        schedule, *caches = self.scheduled
        if op.draw > 0:
            place_entry(self.inputs, state, schedule, op.query_length - 1, *caches)
        return super().forward(state, op, num_logits)


def stage(state: ProposalState, schedule: Schedule, text: torch.Tensor) -> None:
    """Stage requests of [slots, longest] tokens."""
    slots, longest = text.shape
    cascade_steps.stage(
        state,
        schedule,
        index=empty(meta.BATCH),
        text=text,
        length=empty(slots),
        num_sampled=empty(meta.BATCH),
        temperature=floats(slots),
        **filters(slots)._asdict(),
        seeds=longs(slots),
        most_drafted=empty(slots),
        scales=floats(schedule.num_levels),
        max_model_len=longest,
    )
