"""Greedy serving with known costs, in place of an engine: time is counted, not measured.

The text of every request is written beforehand, and what each level says at each of its positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch

from vllm_hsd.cascade.level import (
    UNLIMITED,
    DraftBatch,
    LevelOptions,
    LookupLevel,
    LookupResult,
    Sources,
)
from vllm_hsd.cascade.stopping import EntropyThresholds
from vllm_hsd.rules.branches import follow
from vllm_hsd.tools.reference.cascade import Cascade

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
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Guess:
    """A lookup: right with probability `rate`, with an offer at a share `found` of positions."""

    rate: float | np.ndarray
    found: float = 1.0
    confidence: float | np.ndarray = 0.5
    seconds: float = SEARCH_SECONDS

    def start(self, texts: np.ndarray, clock: Clock, seed: int) -> None:
        rng = np.random.default_rng(seed)
        right = rng.random(texts.shape) < np.reshape(self.rate, (-1, 1))
        self.guesses = np.where(right, texts, (texts + 1) % VOCABULARY)
        self.offers = rng.random(texts.shape) < self.found
        self.clock = clock

    def read(self, *args) -> None:
        pass

    forget = read

    def lookup(self, texts, requested) -> LookupResult:
        _, rows, _, ends = texts
        self.clock.now += self.seconds
        width = int(requested.max(initial=0))
        token_ids = self.guesses[rows[:, None], ends[:, None] + np.arange(width)]
        counts = np.where(self.offers[rows, ends], requested, 0)
        confidence = np.broadcast_to(self.confidence, len(self.offers))[rows, None]
        confidence = confidence ** np.arange(1, width + 1)
        return LookupResult(token_ids, counts, confidence)


@dataclass
class Drafter:
    """A model: right with probability `rate` in the mean, and more often where it is sure.

    Attributes:
        rate: acceptance rate, one or one per request.
        seconds: of a pass by tokens.
        sureness: how far its confidence tells right from wrong; 0 for not at all.
        near: how often the right token is its second likeliest where it is wrong.
    """

    rate: float | np.ndarray
    seconds: Callable[[int], float]
    sureness: float = 1.0
    near: float = 0.0
    keeps_cache = True
    context_length = UNLIMITED

    def start(self, texts: np.ndarray, clock: Clock, seed: int) -> None:
        rng = np.random.default_rng(seed)
        rate = np.broadcast_to(np.reshape(self.rate, (-1, 1)), texts.shape)
        spread = rng.beta(2 * rate, 2 * (1 - rate))
        right = rng.random(texts.shape) < rate + self.sureness * (spread - rate)
        self.guesses = np.where(right, texts, (texts + 2) % VOCABULARY)
        is_near = rng.random(texts.shape) < self.near
        self.second = np.where(is_near & ~right, texts, (texts + 3) % VOCABULARY)
        self.confidence = np.clip(spread, 0.03, 0.999)
        self.clock = clock

    def forward(self, tokens, rows, starts, counts, num_logits):
        self.clock.now += self.seconds(int(counts.sum()))
        owners = np.repeat(np.arange(len(rows)), num_logits)
        offsets = np.arange(len(owners)) - np.repeat(np.cumsum(num_logits) - num_logits, num_logits)
        place = (rows[owners], (starts + counts - num_logits + 1)[owners] + offsets)
        sure = self.confidence[place]
        logits = torch.zeros(len(owners), VOCABULARY, dtype=torch.float64)
        peaks = np.log(sure * (VOCABULARY - 1) / (1 - sure))
        if self.near:
            logits[np.arange(len(owners)), self.second[place]] = torch.from_numpy(peaks / 2)
        logits[np.arange(len(owners)), self.guesses[place]] = torch.from_numpy(peaks)
        return logits


@dataclass
class Serving:
    """`size` requests under a target whose step over n tokens takes target(n) seconds.

    Attributes:
        levels: cheapest first; the lowest may be a list of sources.
        fixed: draft lengths of all levels; None to adapt them, up to `LENGTH`.
        branches: drafts of a request that are verified together, at most.
        prompt: tokens that a request begins with, read in a step whose time is not observed; it
            drafts nothing before its second token. 0: requests begin without any.
        noise: spread of the logarithm of a step's time; one step in 100 takes ten times as long.
    """

    target: Callable
    levels: list
    size: int = 1
    fixed: tuple[int, ...] | None = None
    noise: float = 0.05
    branches: int = 1
    prompt: int = 0
    lengths: list[float] = field(default_factory=list)
    passed: list[float] = field(default_factory=list)

    def __post_init__(self):
        self.rng, self.clock = np.random.default_rng(5), Clock()
        self.begun = np.zeros(0, dtype=np.int64)
        self.texts = np.random.default_rng(0).integers(0, VOCABULARY, (self.size, TEXT))
        self.tokens = self.texts.astype(np.int32)
        sources = self.levels[0] if isinstance(self.levels[0], list) else [self.levels[0]]
        for seed, level in enumerate([*sources, *self.levels[1:]]):
            level.start(self.texts, self.clock, seed + 1)
        lowest = sources[0]
        if self.fixed is None or len(sources) > 1:
            lookups = [source for source in sources if isinstance(source, LookupLevel)]
            drafter = None if isinstance(sources[-1], LookupLevel) else sources[-1]
            names = [str(i) for i in range(len(sources))]
            lowest = Sources(names, lookups, drafter, branches=self.branches)
        count = len(self.levels)
        self.options = [LevelOptions(length) for length in self.fixed or [LENGTH] * count]
        self.cascade = self.build([lowest, *self.levels[1:]])
        self.ends = 4 + (np.arange(self.size) * 37) % REQUEST
        self.numbers = self.ends // REQUEST
        self.cached = np.tile(self.ends - 1, (count, 1))

    def build(self, levels) -> Cascade:
        adaptive = self.fixed is None
        return Cascade(levels, self.options, self.size, 0, adaptive, self.branches)

    def use(self, size: int) -> None:
        """Serve so many of the requests from now on."""
        self.active = np.arange(size)

    def run(self, steps: int) -> float:
        """Tokens per second of `steps` steps, their times without noise."""
        tokens, began, extra = 0, self.clock.now, 0.0
        with mock.patch("vllm_hsd.budget.clock.seconds", self.clock):
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
            rows=np.arange(self.size),
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
        if len(drafting):
            most = np.full(len(drafting), self.options[-1].draft_length)
            self.propose(batch, drafting, most, len(slots) - len(self.begun))
        counts = drafts.counts[slots]
        self.lengths.append(counts.mean())
        beside = self.cascade.branches
        passed = len(slots) + int(counts.sum())
        if beside is not None:
            passed += int((beside.counts[slots] - beside.shared[slots]).sum())
        self.passed.append(passed / len(slots))
        seconds = float(self.target(passed + self.prompt * len(self.begun)))
        stalled = 10 if self.rng.random() < 0.01 else 1
        measured = seconds * stalled * np.exp(self.rng.normal(0, self.noise))
        self.clock.now += measured
        if not len(self.begun):
            self.observe(passed, measured)
        place = self.ends[slots, None] + np.arange(drafts.length)
        own = self.texts[slots[:, None], place]
        self.tokens[slots[:, None], place] = own
        same = own == drafts.token_ids[slots]
        same &= np.arange(drafts.length) < counts[:, None]
        accepted = np.logical_and.accumulate(same, axis=1).sum(1)
        if counts.any():
            self.cascade.record_acceptance(slots, accepted, batch.thresholds)
        emitted = accepted + 1
        if beside is not None and counts.any():
            text = np.pad(own, ((0, 0), (0, 1)))
            text[:, -1] = self.texts[slots, self.ends[slots] + drafts.length]
            _, emitted, winner = follow(
                np.where(np.arange(text.shape[1]) < emitted[:, None], text, -1),
                emitted,
                beside.token_ids[slots],
                beside.counts[slots],
                lambda requests, rows, places: text[requests, places],
            )
            self.cascade.record_branches(slots, winner, emitted - accepted - 1)
        self.cached[:, slots] = np.minimum(
            self.cached[:, slots], (self.ends[slots] + accepted)[None]
        )
        self.ends[slots] += emitted
        return int(emitted.sum()), measured - seconds

    def _begin_requests(self, slots) -> np.ndarray:
        """A request ends after REQUEST tokens; the next one takes its slot."""
        for slot in slots[self.ends[slots] > TEXT - 20]:
            self.ends[slot], self.cached[:, slot] = 4, 3
        begins = slots[self.ends[slots] // REQUEST != self.numbers[slots]]
        self.numbers = self.ends // REQUEST
        for slot in begins:
            self.cascade.forget(slot)
        return begins

    def observe(self, tokens: int, seconds: float) -> None:
        if self.cascade.budget is not None:
            self.cascade.budget.times[-1].observe(tokens, seconds)

    def propose(self, batch, slots, most, running):
        budget = self.cascade.budget
        if budget is not None:
            selects = self.fixed is None and budget.selects
            offer = self.cascade.lowest.offer(batch, slots, most) if selects else None
            budget.step = budget.prices(slots, most, self.fixed is None, running, offer)
        return self.cascade.propose(batch, slots, most, budget and budget.step.selection)
