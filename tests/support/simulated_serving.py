"""Greedy serving of known texts with known costs and known guesses; time is not measured."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from support.drafting_levels import drafting_levels

from vllm_hsd.cascade.level import LevelOptions, LookupResult, StepLevels
from vllm_hsd.tools.lookup_level import UNLIMITED, LookupLevel
from vllm_hsd.tools.reference.batch import DraftBatch
from vllm_hsd.tools.reference.cascade import Cascade
from vllm_hsd.tools.reference.stopping import EntropyThresholds

LENGTH, TEXT, REQUEST, VOCABULARY = 8, 2000, 200, 50
SEARCH_SECONDS = 1e-4


def memory_bound(tokens):
    return 0.08 * (1 + 0.01 * tokens)


def cpu(tokens):
    """Between the two, as a small model in 16 bits on a CPU."""
    return 0.016 + 0.0008 * tokens


def compute_bound(tokens):
    return 0.02 + 0.01 * tokens


@dataclass
class Guess(LookupLevel):
    """A lookup: right with probability `rate`, with an offer at a share `found` of positions."""

    rate: float | np.ndarray
    found: float = 1.0
    confidence: float | np.ndarray = 0.5
    seconds: float = SEARCH_SECONDS
    # Of a draft that was asked for ahead: no other search finds it again.
    searched: bool = False

    def start(self, texts: np.ndarray, clock: SimpleNamespace, seed: int) -> None:
        rng = np.random.default_rng(seed)
        right = rng.random(texts.shape) < np.reshape(self.rate, (-1, 1))
        self.guesses = np.where(right, texts, (texts + 1) % VOCABULARY)
        self.offers = rng.random(texts.shape) < self.found
        self.clock, self.last_estimates = clock, np.full((len(texts), LENGTH), np.nan)

    def lookup(self, texts, requested) -> LookupResult:
        _, rows, _, ends = texts
        self.clock.now += self.seconds * (not self.searched)
        self.searched = False
        width = int(requested.max(initial=0))
        token_ids = self.guesses[rows[:, None], ends[:, None] + np.arange(width)]
        counts = np.where(self.offers[rows, ends], requested, 0)
        confidence = np.broadcast_to(self.confidence, len(self.offers))[rows, None]
        found = LookupResult(token_ids, counts, confidence ** np.arange(1, width + 1))
        self.last_estimates[rows, :width] = found.estimates
        return found


@dataclass
class Drafter:
    """A model: right with probability `rate` in the mean, and more often where it is sure."""

    rate: float | np.ndarray
    seconds: Callable[[int], float]  # of a pass by tokens
    sureness: float = 1.0  # how far its confidence tells right from wrong; 0 for not at all
    verifies: bool = True  # a head does not
    # See `HostProgram`; of the lowest level alone.
    timed = None
    context_length = UNLIMITED

    def start(self, texts: np.ndarray, clock: SimpleNamespace, seed: int) -> None:
        rng = np.random.default_rng(seed)
        rate = np.broadcast_to(np.reshape(self.rate, (-1, 1)), texts.shape)
        spread = rng.beta(2 * rate, 2 * (1 - rate))
        right = rng.random(texts.shape) < rate + self.sureness * (spread - rate)
        self.guesses = np.where(right, texts, (texts + 2) % VOCABULARY)
        self.confidence = np.clip(spread, 0.03, 0.999)
        self.clock = clock

    def forward(self, tokens, rows, starts, counts, num_logits):
        self.fed = int(counts.sum())
        seconds = self.seconds(self.fed)
        self.clock.now += seconds
        if self.timed is not None:
            self.timed(0, self.fed, seconds)
        owners = np.repeat(np.arange(len(rows)), num_logits)
        offsets = np.arange(len(owners)) - np.repeat(np.cumsum(num_logits) - num_logits, num_logits)
        place = (rows[owners], (starts + counts - num_logits + 1)[owners] + offsets)
        return torch.nn.functional.one_hot(
            torch.from_numpy(self.guesses[place]), VOCABULARY
        ).double()


class TimedCascade(Cascade):
    """Tells a `HostBudget` of what its levels verify; of all levels, times by the clock."""

    def __init__(self, levels, options, num_slots, clock: SimpleNamespace, budget=None) -> None:
        super().__init__(levels, options, num_slots)
        self.clock, self.budget, self.seconds = clock, budget, [0.0] * len(levels)
        self.estimate = [np.full((num_slots, LENGTH), np.nan) for _ in levels]
        if self.lookup is not None:
            self.estimate[0] = self.lookup.last_estimates

    def goes_on(self, level: int, slots: np.ndarray) -> np.ndarray:
        """bool [n], see `HostProgram`; of fixed drafts, always."""
        if self.budget is None or level != self.selection.top:
            return np.ones(len(slots), dtype=bool)
        counts = self.drafts[level].counts[slots]
        return self.budget.goes_on(level, slots, self.estimate[level][slots], counts)

    def _draft(self, batch, level, slots, requested):
        if level or self.lookup is None:
            place = batch.end[slots, None] + np.arange(LENGTH)
            self.estimate[level][slots] = self.levels[level].confidence[slots[:, None], place]
        began = self.clock.now
        drafts = super()._draft(batch, level, slots, requested)
        self.seconds[level] = self.clock.now - began
        return drafts

    def _draft_from_model(self, batch, slots, requested):
        """Drafts end where the budget says so."""
        drafts, open_ = self.drafts[0], requested > 0
        while open_.any():
            active = np.flatnonzero(open_)
            now = slots[active]
            ended = self._append_own(batch, 0, now, None) | ~self.goes_on(0, now)
            open_[active] = (drafts.counts[now] < requested[active]) & ~ended

    def _verify(self, batch, level, slots, requested, below):
        feeder, began = self.selection.below(level)[0], self.clock.now
        before, drafted = self.drafts[level].counts[slots], below.counts[slots]
        ended = super()._verify(batch, level, slots, requested, below)
        if self.budget is not None:
            self.budget.budget.level_verified(
                feeder,
                level,
                slots,
                requested=requested,
                drafted=drafted,
                estimates=self.estimate[feeder][slots],
                accepted=self.drafts[level].counts[slots] - before - 1,
                computed=self.levels[level].fed,
                drafting_seconds=self.seconds[level - 1],
                verifying_seconds=self.clock.now - began,
            )
        return ended | ~self.goes_on(level, slots)


class Proposal:
    """What `HostBudget` reads of a `HostProgram` and its state, over a cascade of the reference."""

    thresholds = None

    def __init__(self, cascade: TimedCascade, size: int) -> None:
        self.cascade, self.has_lookup = cascade, cascade.lookup is not None
        self.everything = self.selection = cascade.everything
        self.requested, self.draft_length = torch.zeros(2, 1, size, dtype=torch.int32)
        self.estimate = cascade.estimate

    def begin(self, batch: DraftBatch, slots: np.ndarray, most: int) -> None:
        """Of these requests; `requested` and `draft_length` are of them."""
        self.batch, self.slots, self.drafts = batch, slots, np.ones(len(slots), dtype=bool)
        self.requested = torch.full((1, len(slots)), most)

    def draft_ahead(self, state: "Proposal", drafts: np.ndarray) -> LookupResult:
        lookup, requested = self.cascade.lookup, self.requested[-1].numpy().astype(np.int64)
        lookup.searched = False
        found = lookup.lookup(self.batch.texts(self.slots), requested)
        lookup.searched = True
        return found

    def missed(self, level: int) -> np.ndarray:
        return np.zeros(len(self.slots))

    def run(self, selection: StepLevels) -> None:
        self.selection, requested = selection, self.requested[-1].numpy()
        requested[:] = np.minimum(requested, selection.draft_lengths[-1] if selection.levels else 0)
        if selection.most is not None and selection.levels:
            requested[:] = np.minimum(requested, selection.most)
        drafts = self.cascade.propose(self.batch, self.slots, requested.astype(np.int64), selection)
        self.draft_length = torch.from_numpy(drafts.counts[self.slots])


@dataclass
class Serving:
    """`size` requests under a target whose step over n tokens takes target(n) seconds.

    With a `prompt` of some tokens, read in a step whose time is not observed, a request drafts
    nothing before its second token.
    """

    target: Callable
    levels: list  # cheapest first
    size: int = 1
    fixed: tuple[int, ...] | None = None  # draft lengths; None: the budget adapts them to LENGTH
    noise: float = 0.05  # spread of a step's log-time; one in 100 takes ten times as long
    prompt: int = 0
    lengths: list[float] = field(default_factory=list)

    def __post_init__(self):
        from vllm_hsd.host.host_budget import HostBudget

        self.rng, self.clock = np.random.default_rng(5), SimpleNamespace(now=0.0)
        self.begun = np.zeros(0, dtype=np.int64)
        self.texts = np.random.default_rng(0).integers(0, VOCABULARY, (self.size, TEXT))
        self.tokens = self.texts.astype(np.int32)
        for seed, level in enumerate(self.levels):
            level.start(self.texts, self.clock, seed + 1)
        lengths = list(self.fixed or [LENGTH] * len(self.levels))
        is_lookup = isinstance(self.levels[0], LookupLevel)
        self.budget = None
        if self.fixed is None:
            verify = all(level.verifies for level in self.levels[1:])
            told = drafting_levels(lengths, looks_up=is_lookup, verify=verify)
            self.budget = HostBudget(told, self.size)
        if self.budget is not None and not is_lookup:
            self.levels[0].timed = self.budget.timed
        options = [LevelOptions(length) for length in lengths]
        self.cascade = TimedCascade(self.levels, options, self.size, self.clock, self.budget)
        self.proposal, self.most = Proposal(self.cascade, self.size), lengths[-1]
        self.ends = 4 + (np.arange(self.size) * 37) % REQUEST
        self.numbers = self.ends // REQUEST
        self.cached = np.tile(self.ends - 1, (len(self.levels), 1))

    def use(self, size: int) -> None:
        self.active = np.arange(size)

    def run(self, steps: int) -> float:
        """Tokens per second of `steps` steps, their times without noise."""
        tokens, began, extra = 0, self.clock.now, 0.0
        with (
            mock.patch("vllm_hsd.budget.clock.seconds", lambda: self.clock.now),
            mock.patch("vllm_hsd.host.host_budget._agreed", lambda found: found()),
        ):
            for _ in range(steps):
                emitted, noise = self._step()
                tokens, extra = tokens + emitted, extra + noise
        return tokens / (self.clock.now - began - extra)

    def _step(self) -> tuple[int, float]:
        slots = getattr(self, "active", np.arange(self.size))
        idle, begins = self.begun, self._begin_requests(slots)
        if self.prompt:
            self.begun = begins
            idle = np.union1d(idle, begins)
        batch = DraftBatch(
            tokens=self.tokens,
            end=self.ends.copy(),
            cached=self.cached,
            eos=np.full(self.size, -1),
            greedy=True,
            probs=None,
            uniforms=None,
            thresholds=EntropyThresholds.fresh(len(self.levels), self.size),
        )
        drafting = np.setdiff1d(slots, idle)
        drafts = self.cascade.drafts[-1]
        drafts.clear(slots)
        self._propose(batch, drafting, len(slots) - len(self.begun))
        counts = drafts.counts[slots]
        self.lengths.append(counts.mean())
        passed = len(slots) + int(counts.sum())
        seconds = float(self.target(passed + self.prompt * len(self.begun)))
        stalled = 10 if self.rng.random() < 0.01 else 1
        measured = seconds * stalled * np.exp(self.rng.normal(0, self.noise))
        self.clock.now += measured
        place = self.ends[slots, None] + np.arange(drafts.length)
        own = self.texts[slots[:, None], place]
        self.tokens[slots[:, None], place] = own
        same = own == drafts.token_ids[slots]
        same &= np.arange(drafts.length) < counts[:, None]
        accepted = np.logical_and.accumulate(same, axis=1).sum(1)
        self.cascade.record_acceptance(slots, accepted, batch.thresholds)
        if self.budget is not None:
            step = SimpleNamespace(
                num_reqs=len(slots),
                idx_mapping_np=slots,
                num_scheduled_tokens=counts + 1,
                has_prefill=len(self.begun) > 0,
            )
            self.budget.step_ended(step, self.proposal, accepted + 1, counts - accepted)
        self.cached[:, slots] = np.minimum(
            self.cached[:, slots], (self.ends[slots] + accepted)[None]
        )
        self.ends[slots] += accepted + 1
        return int(accepted.sum()) + len(slots), measured - seconds

    def _begin_requests(self, slots) -> np.ndarray:
        """A request ends after REQUEST tokens; the next one takes its slot."""
        for slot in slots[self.ends[slots] > TEXT - 20]:
            self.ends[slot], self.cached[:, slot] = 4, 3
        begins = slots[self.ends[slots] // REQUEST != self.numbers[slots]]
        self.numbers = self.ends // REQUEST
        for slot in begins:
            self.cascade.forget(slot)
            if self.budget is not None:
                self.budget.forget(slot)
        return begins

    def _propose(self, batch: DraftBatch, slots: np.ndarray, running: int) -> None:
        proposal, budget = self.proposal, self.budget
        proposal.begin(batch, slots, self.most)
        if budget is None:
            proposal.run(self.cascade.everything)
        elif not len(slots):
            budget.nothing_drafted()
        else:
            left = np.full(len(slots), REQUEST)
            proposal.run(budget.select(proposal, proposal, running, left))
            budget.proposal_ended(proposal, proposal)
