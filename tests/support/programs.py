"""Programs over table-driven levels with paged caches, and the host's cascade next to them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from oracle.exact import Table
from oracle.stand_ins import TableLevel
from support.proposal_states import MAX_NUM_REQS, block_tables, schedule_of, state_of

from vllm_hsd.cascade import cascade_steps, entropy_stopping
from vllm_hsd.cascade.counters import LevelCounts
from vllm_hsd.cascade.entropy_stopping import DeviceThresholds
from vllm_hsd.cascade.filled_blocks import FilledBlocks
from vllm_hsd.cascade.level import Level, LevelOptions, StepLevels
from vllm_hsd.cascade.program import Program, ProgramLookup, ProgramSources
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.cascade.ragged import ragged_arange
from vllm_hsd.cascade.schedule import Schedule, first_draw
from vllm_hsd.cascade.several_drafts import SeveralDrafts, SeveralDraftsProgram
from vllm_hsd.host.host_program import HostProgram
from vllm_hsd.host.host_sources import HostSources
from vllm_hsd.host.level_caches import LevelCaches
from vllm_hsd.kernels.filter_rows import Filters
from vllm_hsd.rules.rng import host_uniforms
from vllm_hsd.tools.reference.batch import DraftBatch
from vllm_hsd.tools.reference.cascade import Cascade
from vllm_hsd.tools.reference.drafts import DraftStore
from vllm_hsd.tools.reference.stopping import EntropyThresholds

MAX_MODEL_LEN, PROMPT, BLOCK_SIZE = 40, 5, 4


class CachedTableLevel:
    """A model that sees only what its KV cache holds: tokens, written where `slot_mapping` says."""

    in_target_cache = False

    def __init__(self, table: Table, blocks: torch.Tensor, dtype=torch.float32) -> None:
        self.rows = TableLevel(table, PROMPT)
        self.blocks, self.dtype = blocks, dtype
        self.cache = torch.full((blocks.numel() * BLOCK_SIZE,), -1, dtype=torch.int64)

    def places(self, slot: int, length: int) -> torch.Tensor:
        positions = torch.arange(length)
        return (
            self.blocks[slot, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        )

    def ingest(self, slot: int, tokens: torch.Tensor) -> None:
        """Compute the tokens of a prompt, as a prefill does."""
        self.cache[self.places(slot, len(tokens))] = tokens.long()

    def forward(self, state: ProposalState, op, num_logits: int) -> torch.Tensor:
        q, batch = op.query_length, state.batch
        vocabulary = self.rows.table.vocabulary
        for at, place in enumerate(state.slot_mapping[0, : batch * q].tolist()):
            if place >= 0:
                self.cache[place] = int(state.input_ids[at])
        logits = torch.full((batch * num_logits, vocabulary), float("nan"), dtype=self.dtype)
        for b in range(batch):
            assert state.query_start_loc[b + 1] - state.query_start_loc[b] in (0, q)
            if state.seq_lens[b] == 0:
                continue
            # Attention takes the positions of a query from the end of the text.
            assert state.positions[(b + 1) * q - 1] == state.seq_lens[b] - 1
            if state.drafted[-1, b] < state.requested[-1, b]:
                assert state.positions[b * q] == state.seq_lens[b] - q
            cached = self.cache[self.places(int(state.slot[b]), int(state.seq_lens[b]))].tolist()
            for i in range(num_logits):
                text = cached[: len(cached) - num_logits + 1 + i]
                # A hole shows as an invalid row, which ends a draft and changes the tokens.
                if -1 not in text and max(text) < vocabulary:
                    row = self.rows.row(tuple(text[PROMPT:]))
                    logits[b * num_logits + i] = torch.tensor(row, dtype=self.dtype)
        return logits


class Engine:
    """Requests, caches and levels for proposals of one schedule; the target is left to the tests.

    Args:
        batch, requests: rows of the state, and how many of them are real.
        sources: lookups next to the lowest level.
        lookup: what level 0 is in the place of a model.
        host: run it as a CPU does, see `host.host_program`.
        drafts: of each request that the only level draws.
    """

    def __init__(
        self,
        lengths,
        rounds=(),
        verifiers=("block",) * 3,
        *,
        stopping=("fixed",) * 3,
        horizontal_tokens: int = 0,
        batch: int = 4,
        requests: int = 3,
        vocabulary: int = 5,
        dtype=torch.float32,
        greedy: bool = False,
        seed: int = 0,
        sources: ProgramSources | None = None,
        lookup: ProgramLookup | None = None,
        host: bool = False,
        drafts: int = 1,
    ) -> None:
        limits = [None, *rounds, *[None] * len(lengths)]
        kind = {"lookup": lookup is not None, "chooses": sources is not None, "drafts": drafts}
        self.schedule = schedule_of(
            *lengths, rounds=rounds, horizontal_tokens=horizontal_tokens, **kind
        )
        self.options = [
            LevelOptions(
                n,
                verifiers[k],
                max_rounds=limits[k] if host else self.schedule.rounds[k] or None,
                stopping=stopping[k],
            )
            for k, n in enumerate(lengths)
        ]
        self.tables = [Table(vocabulary, 100 + k) for k in range(len(lengths))]
        self.groups, self.blocks = block_tables(seed, sizes=(BLOCK_SIZE,))
        self.lookup = lookup
        self.levels = [CachedTableLevel(t, self.blocks[0], dtype) for t in self.tables]
        self.state = state_of(self.schedule, batch, vocabulary, dtype, lookup=lookup is not None)
        self.thresholds = None
        if "entropy" in stopping:
            stops = [option.stopping == "entropy" for option in self.options]
            self.thresholds = DeviceThresholds(stops, self.state)
        self.host_thresholds = EntropyThresholds.fresh(len(lengths), requests)
        made: Any = Program
        self.host = host
        if host:
            caches = TableCaches(self)
            counts = LevelCounts.zeros(len(lengths))
            program = HostProgram if sources is None else HostSources
            made = partial(program, caches=caches, counts=counts)
        if drafts > 1:
            self.several = SeveralDrafts.allocate(self.state, drafts, [batch], batch)
            made = partial(SeveralDraftsProgram, kept=self.several)
        self.program = made(
            self.schedule,
            [
                Level(run, option.verifier, option.max_rounds)
                for run, option in zip(
                    [lookup or self.levels[0], *self.levels[1:]], self.options, strict=True
                )
            ],
            self.groups,
            MAX_MODEL_LEN,
            self.thresholds,
            sources,
        )
        g = torch.Generator().manual_seed(seed)
        self.index = torch.randperm(MAX_NUM_REQS, generator=g)[:requests].to(torch.int32)
        self.text = torch.zeros(MAX_NUM_REQS, MAX_MODEL_LEN, dtype=torch.int32)
        self.text[:, :PROMPT] = torch.randint(0, vocabulary, (MAX_NUM_REQS, PROMPT), generator=g)
        self.length = torch.full((MAX_NUM_REQS,), PROMPT, dtype=torch.int32)
        self.temperature = torch.rand(MAX_NUM_REQS, generator=g) + 0.5
        if greedy:
            self.temperature.zero_()
        without = torch.zeros(MAX_NUM_REQS)
        self.filters = Filters(without.int(), without + 1, without)
        self.seeds = torch.randint(-(2**62), 2**62, (MAX_NUM_REQS,), generator=g)
        self.most_drafted = torch.full((MAX_NUM_REQS,), MAX_MODEL_LEN, dtype=torch.int32)
        equal = "none" in verifiers or horizontal_tokens
        scales = [1.0] * 3 if equal else [0.75, 1.0, 1.5]
        self.scales = torch.tensor(scales[: len(lengths)])
        for slot in self.index.tolist():
            for level in self.levels if not host else ():
                level.ingest(slot, self.text[slot, : PROMPT - 1])

    def propose(
        self, selection: StepLevels | Callable[[ProposalState], StepLevels | None] | None = None
    ) -> list[list[int]]:
        """The drafts of all requests, on the host by levels selected after `HostProgram.begin`."""
        cascade_steps.stage(
            self.state,
            self.schedule,
            index=self.index,
            text=self.text,
            length=self.length,
            num_sampled=torch.ones(len(self.index), dtype=torch.int32),
            temperature=self.temperature,
            **self.filters._asdict(),
            seeds=self.seeds,
            most_drafted=self.most_drafted,
            scales=self.scales,
            max_model_len=MAX_MODEL_LEN,
        )
        if self.host:
            state = self.state.bucket(len(self.index))
            self.program.begin(state)
            if callable(selection):
                selection = selection(state)
            if selection is not None and selection.most is not None:
                selection = replace(selection, most=selection.most[self.program.drafts])
            self.program.run(state, selection)
        else:
            self.program.run(self.state)
        return self.drafts()

    def drafts(self) -> list[list[int]]:
        lengths = self.state.draft_length.tolist()
        return [self.state.draft_tokens[b, : lengths[b]].tolist() for b in range(len(self.index))]

    def commit(self, b: int, tokens: list[int]) -> None:
        """The target's step has kept these tokens."""
        slot, n = int(self.index[b]), int(self.length[self.index[b]])
        tokens = tokens[: MAX_MODEL_LEN - n]
        self.text[slot, n : n + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.length[slot] = n + len(tokens)

    def keep_some(self, drafts: list[list[int]], rng: np.random.Generator) -> None:
        """The step of a target that keeps any part of every draft and adds any token."""
        accepted = np.zeros(len(drafts), dtype=np.int64)
        for b, draft in enumerate(drafts):
            accepted[b] = kept = rng.integers(0, len(draft) + 1)
            self.commit(b, [*draft[:kept], int(rng.integers(0, self.tables[0].vocabulary))])
        if self.thresholds is not None:
            sampled = torch.from_numpy(accepted + 1).int()
            fed = 1 + self.schedule.num_speculative_tokens
            entropy_stopping.observe_target(
                self.thresholds,
                self.state,
                index=self.index,
                num_sampled=sampled,
                num_rejected=fed - sampled,
            )
            self.cascade.record_acceptance(np.arange(len(drafts)), accepted, self.host_thresholds)

    def host_drafts(self, selection: StepLevels | None = None) -> list[list[int]]:
        """What the host's cascade drafts on the same texts with the same uniforms."""
        slots = np.arange(len(self.index))
        order = self.index.long().numpy()
        length = self.length.numpy()[order].astype(np.int64)
        tokens = np.zeros((len(slots), MAX_MODEL_LEN + 20), dtype=np.int32)
        tokens[:, :MAX_MODEL_LEN] = self.text.numpy()[order]
        levels = [TableLevel(t, PROMPT) for t in self.tables]
        numbered = _CountedCascade if self.host else _NumberedCascade
        self.cascade = cascade = numbered(levels, self.options, len(slots), self.schedule)
        temperature = (self.temperature[:, None] * self.scales).numpy()[order]
        seeds = self.seeds.numpy()[order]

        def probs(logits, requests, level):
            scale = torch.from_numpy(temperature[requests, level]).double()[:, None]
            one_hot = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[1]).double()
            return torch.where(scale > 0, (logits / scale.clamp_min(1e-9)).softmax(-1), one_hot)

        def uniforms(requests, counts, level):
            owners, offsets = ragged_arange(counts)
            first = first_draw(length[requests]) + cascade.first_offset(level, counts)
            return host_uniforms(seeds[requests[owners]], np.int64(level), first[owners] + offsets)

        batch = DraftBatch(
            tokens=tokens,
            end=length.copy(),
            cached=np.zeros((len(levels), len(slots)), dtype=np.int64),
            eos=np.full(len(slots), -1),
            greedy=False,
            probs=probs,
            uniforms=uniforms,
            thresholds=self.host_thresholds,
        )
        # The last places of a text are not drafted for, as they would not hold the horizontal ones.
        room = np.minimum(
            self.schedule.draft_lengths[-1], MAX_MODEL_LEN - self.schedule.margin - length
        )
        drafts_any = (room > 0) & (length >= self.schedule.window)
        requested = np.where(drafts_any, room + self.schedule.horizontal_tokens, 0)
        drafts: DraftStore = cascade.propose(batch, slots, requested, selection)
        return [drafts.token_ids[b, : drafts.counts[b]].tolist() for b in slots]


class _NumberedCascade(Cascade):
    """Knows at which op of the schedule it is, to take the draws of that op."""

    def __init__(self, levels, options, num_slots, schedule: Schedule) -> None:
        super().__init__(levels, options, num_slots, schedule.horizontal_tokens)
        self.schedule = schedule
        self.call = [0] * len(levels)
        self.round = [0] * len(levels)
        self.depth = 0

    def _draft(self, batch, level, slots, requested):
        above = level + 1
        self.round[level] = 0
        self.call[level] = 0
        if above < len(self.levels):
            self.call[level] = self.call[above] * self.schedule.rounds[above] + self.round[above]
            self.round[above] += 1
        if self.horizontal_tokens and self.depth == level == 0:
            # Horizontal tokens, after all rounds of the schedule.
            self.call[0] = prod(self.schedule.rounds[1:])
        self.depth += 1
        drafts = super()._draft(batch, level, slots, requested)
        self.depth -= 1
        return drafts

    def first_offset(self, level: int, counts: np.ndarray) -> int:
        lengths = self.schedule.draft_lengths
        if level == 0:
            return self.call[0] * lengths[0]
        number = self.call[level] * self.schedule.rounds[level] + self.round[level] - 1
        return number * (lengths[level - 1] + 1)


class _CountedCascade(Cascade):
    """Takes draws as `HostProgram` does: one after the other, as many as any request may need."""

    def __init__(self, levels, options, num_slots, schedule: Schedule) -> None:
        super().__init__(levels, options, num_slots, schedule.horizontal_tokens)
        self.used = [0] * len(levels)

    def first_offset(self, level: int, counts: np.ndarray) -> int:
        first = self.used[level]
        self.used[level] += int(counts.max(initial=0))
        return first


class TableCaches(LevelCaches):
    """Of an `Engine`; `read` lets tables read prompts."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.levels, self.keeps = engine, list(engine.levels), True
        if engine.lookup is not None:
            self.levels[0] = None
        self.own = [k for k, level in enumerate(self.levels) if level is not None]
        self.computed = np.zeros((len(self.levels), MAX_NUM_REQS), dtype=np.int64)
        self.marked, self.hits = np.zeros_like(self.computed), np.zeros(MAX_NUM_REQS, np.int64)
        self.blocks = FilledBlocks(len(self.levels), BLOCK_SIZE)
        self.speculator, self.loads = SimpleNamespace(max_num_tokens=64), False

    def _table(self) -> np.ndarray:
        return self.engine.blocks[0].numpy()

    def _compute(self, level, slots, begins, counts) -> None:
        model = self.levels[level]
        for slot, begin, count in zip(slots.tolist(), begins, counts, strict=True):
            end = int(begin + count)
            places = model.places(slot, end)[int(begin) :]
            model.cache[places] = self.engine.text[slot, int(begin) : end].long()
