"""Greedy serving with known costs, in place of an engine: time is counted, not measured.

The text of every request is written beforehand. A lookup and a drafter are right at each of its
positions with a probability of their own, drawn once.
"""

from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch

from vllm_hsd.core.cascade import Cascade
from vllm_hsd.core.levels import UNLIMITED, DraftBatch, FirstOf, LevelOptions, Lookup
from vllm_hsd.core.stopping import EntropyThresholds

LENGTH, TEXT, VOCABULARY = 8, 3000, 50


@dataclass
class Guess:
    """A lookup, right with probability `rate`, with an offer at a share `found` of positions."""

    rate: float
    texts: np.ndarray
    found: float = 1.0
    confidence: float = 0.5
    seed: int = 1

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        wrong = (self.texts + 1) % VOCABULARY
        self.guesses = np.where(rng.random(self.texts.shape) < self.rate, self.texts, wrong)
        self.offers = rng.random(self.texts.shape) < self.found

    def read(self, *args) -> None:
        pass

    forget = set_aside = restore = read

    def lookup(self, tokens, rows, slots, ends, requested) -> Lookup:
        width = int(requested.max(initial=0))
        token_ids = self.guesses[rows[:, None], ends[:, None] + np.arange(width)]
        counts = np.where(self.offers[rows, ends], requested, 0)
        confidence = np.tile(self.confidence ** np.arange(1, width + 1), (len(rows), 1))
        return Lookup(token_ids, counts, confidence)


@dataclass
class Drafter:
    """Right with probability `rate` at every position; a pass takes `seconds`."""

    rate: float
    texts: np.ndarray
    seconds: float
    clock: "Clock"
    keeps_cache = False
    context_length = UNLIMITED

    def __post_init__(self):
        self.guesses = Guess(self.rate, self.texts, seed=2).guesses

    def forward(self, tokens, rows, starts, counts, num_logits):
        self.clock.now += self.seconds
        logits = torch.zeros(len(rows), VOCABULARY)
        at = self.guesses[rows, starts + counts]
        logits[torch.arange(len(rows)), torch.from_numpy(at)] = 5.0
        return logits


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Serving:
    """`size` requests under a target whose step over n tokens takes target(n) seconds.

    Attributes:
        lookups: (rate, share of positions with an offer, own confidence) of each lookup.
        drafter: (rate, seconds of a pass), None without one.
        noise: spread of the logarithm of a step's time; one step in 100 takes ten times as long.
    """

    target: object
    lookups: list = field(default_factory=list)
    drafter: tuple[float, float] | None = None
    size: int = 1
    noise: float = 0.05
    repeats: bool = False

    def __post_init__(self):
        rng = np.random.default_rng(0)
        self.rng, self.clock = np.random.default_rng(5), Clock()
        self.texts = rng.integers(0, VOCABULARY, (self.size, TEXT))
        self.tokens = self.texts.astype(np.int32)
        guesses = [
            Guess(rate, self.texts, found, confidence, seed=10 + i)
            for i, (rate, found, confidence) in enumerate(self.lookups)
        ]
        drafter = self.drafter and Drafter(
            *self.drafter[:1], self.texts, self.drafter[1], self.clock
        )
        names = [str(i) for i in range(len(guesses) + (drafter is not None))]
        self.cascade = Cascade(
            [FirstOf(names, guesses, drafter)], [LevelOptions(LENGTH)], self.size
        )
        self.ends = np.full(self.size, 4)
        self.cached = np.zeros((1, self.size), dtype=np.int64)
        self.lengths: list[float] = []

    def run(self, steps: int) -> float:
        """Tokens per second of `steps` steps, their times without noise."""
        tokens, began, extra = 0, self.clock.now, 0.0
        with mock.patch("vllm_hsd.core.cascade.time.perf_counter", self.clock):
            for _ in range(steps):
                emitted, noise = self._step()
                tokens, extra = tokens + emitted, extra + noise
        return tokens / (self.clock.now - began - extra)

    def _step(self) -> tuple[int, float]:
        cascade, slots = self.cascade, np.arange(self.size)
        self.ends = np.where(self.ends > TEXT - 20, 4, self.ends)
        tokens = self.tokens
        self.cached[:] = self.ends
        batch = DraftBatch(
            tokens=tokens,
            rows=slots,
            end=self.ends.copy(),
            cached=self.cached - 1,
            eos=np.full(self.size, -1),
            greedy=True,
            probs=None,
            uniforms=None,
            thresholds=EntropyThresholds.fresh(1, self.size),
            repeats=np.full(self.size, self.repeats),
            prices=cascade.learning.current_prices(self.size),
        )
        drafts = cascade.propose(batch, slots, np.full(self.size, LENGTH))
        counts = drafts.counts[slots]
        self.lengths.append(counts.mean())
        seconds = self.target(self.size + int(counts.sum()))
        stalled = 10 if self.rng.random() < 0.01 else 1
        measured = seconds * stalled * np.exp(self.rng.normal(0, self.noise))
        self.clock.now += measured
        cascade.learning.target_times.observe(self.size + int(counts.sum()), measured)
        place = self.ends[:, None] + np.arange(LENGTH)
        tokens[slots[:, None], place] = self.texts[slots[:, None], place]
        same = self.texts[slots[:, None], place] == drafts.token_ids
        same &= np.arange(LENGTH) < counts[:, None]
        accepted = np.logical_and.accumulate(same, axis=1).sum(1)
        if counts.any():
            cascade.record_acceptance(slots, accepted, batch.thresholds)
        self.ends = self.ends + accepted + 1
        return int((accepted + 1).sum()), measured - seconds
