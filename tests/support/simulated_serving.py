"""Serving with known costs and acceptance, in place of an engine: time is counted, not measured."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vllm_hsd.core.controller import DepthController
from vllm_hsd.core.levels import Selection


def flat(tokens):
    """Seconds of a memory-bound target."""
    return 0.08 * (1 + 0.01 * tokens)


def steep(tokens):
    """Seconds of a compute-bound target."""
    return 0.02 + 0.01 * tokens


def model(tokens):
    """Seconds of a model that drafts."""
    return 0.008 * (1 + 0.02 * tokens)


@dataclass
class SimulatedServing:
    """A lookup (level 0) and a model (level 1) under a target.

    Attributes:
        target: seconds of the target's step by tokens.
        model: seconds of the model's forward pass by tokens.
        rates: [slots] acceptance rate of the model's tokens by the target.
        lookup_rate: acceptance rate of the lookup's tokens, by the model and by the target.
        lookup_found: share of lookups that find anything.
        noise: spread of the logarithm of measured times; one time in 100 is ten times as long.
    """

    target: Callable
    model: Callable
    rates: np.ndarray
    lookup_rate: float = 0.3
    lookup_found: float = 0.5
    noise: float = 0.05
    seed: int = 0
    rng: np.random.Generator = field(init=False)

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)

    def step(self, choice: Selection, lengths, slots, controller=None):
        """(tokens emitted, seconds of the step without noise); the controller sees the noise."""
        self.controller, self.seconds = controller, 0.0
        drafted = np.zeros(len(slots), dtype=np.int64)
        if choice.levels:
            drafted = self._draft(choice, len(choice.levels) - 1, lengths, slots)
        passed = int((drafted + 1).sum())
        self._spend(self.target(passed), passed, controller and controller.target_times)
        accepted = np.zeros(len(slots), dtype=np.int64)
        if choice.levels:
            accepted = self._accepted(choice.levels[-1], 2, drafted, slots)
            self._observe(choice.levels[-1], 2, slots[lengths > 0], drafted, accepted, lengths > 0)
        return int((accepted + 1).sum()), self.seconds

    def _draft(self, choice, depth, wanted, slots):
        level = choice.levels[depth]
        times = self.controller and self.controller.level_times[level]
        if depth == 0 and level == 0:
            self._spend(0.0002, len(slots), times)
            return np.where(self.rng.random(len(slots)) < self.lookup_found, wanted, 0)
        if depth == 0:
            for position in range(int(wanted.max(initial=0))):
                size = int((wanted > position).sum())
                self._spend(self.model(size), size, times)
            return wanted
        drafted = np.zeros_like(wanted)
        while (drafted < wanted).any():
            open_ = drafted < wanted
            room = np.where(open_, wanted - drafted - 1, 0)
            below = self._draft(choice, 0, np.minimum(room, choice.draft_lengths[0]), slots)
            size = int((below + 1)[open_].sum())
            self._spend(self.model(size), size, times)
            accepted = self._accepted(0, 1, below, slots)
            self._observe(0, 1, slots[room > 0], below, accepted, room > 0)
            drafted = np.where(open_, drafted + accepted + 1, drafted)
        return np.minimum(drafted, wanted)

    def _accepted(self, level, verifier, lengths, slots):
        rates = self.rates[slots] if level == 1 else np.full(len(slots), self.lookup_rate)
        longest = int(lengths.max(initial=0))
        kept = self.rng.random((len(slots), longest)) < rates[:, None]
        return np.minimum(np.logical_and.accumulate(kept, axis=1).sum(1), lengths)

    def _observe(self, level, verifier, slots, lengths, accepted, asked):
        if self.controller:
            pair, acceptance = self.controller.pair(level, verifier), self.controller.acceptance
            acceptance.count(pair, int(asked.sum()), int((lengths[asked] > 0).sum()))
            acceptance.observe(pair, slots, lengths[asked], accepted[asked])

    def _spend(self, seconds, tokens, times):
        self.seconds += seconds
        if times:
            stalled = 10 if self.rng.random() < 0.01 else 1
            times.observe(tokens, seconds * stalled * np.exp(self.rng.normal(0, self.noise)))

    def tokens_per_second(self, choice: Selection, slots, steps: int = 400) -> float:
        """Goodput of one fixed choice."""
        lengths = np.full(len(slots), choice.draft_lengths[-1] if choice.levels else 0)
        counted = [self.step(choice, lengths, slots) for _ in range(steps)]
        return sum(t for t, _ in counted) / sum(s for _, s in counted)

    def adaptive_tokens_per_second(
        self, controller: DepthController, slots, steps: int, most: int = 8
    ) -> float:
        """Goodput under the controller."""
        total = seconds = 0.0
        for _ in range(steps):
            choice, lengths = controller.choose(slots, np.full(len(slots), most))
            tokens, taken = self.step(choice, lengths, slots, controller)
            total, seconds = total + tokens, seconds + taken
        return total / seconds
