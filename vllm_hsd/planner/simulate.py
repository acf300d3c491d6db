"""Discrete-event simulation of a cascade: a clock, batches in lock-step, and any acceptance.

`latency.predict` gives the expectation for one request; here a batch of requests shares every
forward, so a level's loop lasts until the slowest request has its tokens. Several independent
replicas of the batch run side by side as numpy arrays [replicas, batch].
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_hsd.planner.costs import Costs, Role
from vllm_hsd.planner.latency import (
    Cascade,
    Prediction,
    check_reach,
    level_gains,
    target_gains,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

BLOCKS = 20


class World(Protocol):
    """Where tokens come from; `who` [replicas, batch] selects the requests that take part."""

    def draft(self, who: Mask) -> None:
        """Level 0 appends one token to each request."""

    def verify(self, who: Mask, level: int, made: Ints, drafted: Ints) -> Ints:
        """Level `level` (K: the target) verifies the last `drafted` tokens of each request.

        Keeps a prefix of them, appends one token, and returns how many it kept [replicas, batch].
        It has `made` tokens since it was asked; the target: 0.
        """
        ...


class Coins:
    """Tokens without content: rounds accept independently, by survival tables.

    Args:
        cascade: whose pairs of levels meet.
        survival: [M + 1, M + 1, T + 1, T + 1, T + 1], see `latency.target_gains`.
        rng: source of the coins.
    """

    def __init__(self, cascade: Cascade, survival: Floats, rng: np.random.Generator):
        check_reach(cascade, survival)
        self.reached = [gains.cumsum(-1) for gains in level_gains(cascade, survival)]
        rows = [row[-1] for row in target_gains(cascade, survival)]
        longest = len(rows[-1])
        padded = [np.pad(row, (0, longest - len(row))) for row in rows]
        self.reached.append(np.array(padded).cumsum(-1)[None])
        self.tail, self.top = cascade.tail, len(cascade.levels)
        self.rng = rng

    def draft(self, who: Mask) -> None:
        pass

    def verify(self, who: Mask, level: int, made: Ints, drafted: Ints) -> Ints:
        buffer = np.maximum(drafted - self.tail, 0) if level == self.top else drafted
        reached = self.reached[level - 1][made, buffer]
        gain = (reached <= self.rng.random(who.shape)[..., None]).sum(-1)
        return np.minimum(gain, drafted + 1) - 1  # rounding may leave the last sum below 1


class _Run:
    """The recursion over levels for all replicas, with their clocks."""

    def __init__(
        self, cascade: Cascade, costs: Costs, world: World, replicas: int, batch: int
    ) -> None:
        self.cascade, self.costs, self.world = cascade, costs, world
        self.depth = len(cascade.levels)
        self.everyone = np.ones((replicas, batch), dtype=bool)
        self.behind = np.ones((self.depth, replicas, batch), dtype=np.int64)
        self.ms = np.zeros((self.depth + 1, replicas))
        self.calls = np.zeros((self.depth + 1, replicas))
        self.known: dict[tuple[int, int, int], float] = {}

    def forward(self, level: int, who: Mask, tokens: Ints) -> None:
        """Advance the clocks by one forward over `tokens` of each active request."""
        active = who.sum(1)
        running = active > 0
        total = (tokens * who).sum(1)
        shift = int(total.max()) + 1
        keys, which = np.unique(active[running] * shift + total[running], return_inverse=True)
        times = np.array([self.turn(level, *divmod(key, shift)) for key in keys.tolist()])
        self.ms[level, running] += times[which]
        self.calls[level, running] += 1

    def turn(self, level: int, active: int, total: int) -> float:
        key = level, active, total
        if key not in self.known:
            model = -1 if level == self.depth else self.cascade.levels[level]
            role: Role = "draft" if level == 0 else "target" if level == self.depth else "verify"
            self.known[key] = self.costs.turn(model, role, active, total / active)
        return self.known[key]

    def make(self, level: int, want: Ints) -> Ints:
        """Level `level` makes up to `want` tokens for each request; returns how many."""
        made = np.zeros_like(want)
        rounds = 0
        while (who := made < want).any():
            if level == 0:
                self.forward(0, who, self.behind[0])
                self.world.draft(who)
                self.behind[0, who] = 1
                self.behind[1:, who] += 1
                made += who
                continue
            if rounds == self.cascade.limit(level):
                break
            rounds += 1
            room = np.where(who, want - made - 1, 0)
            drafted = self.make(level - 1, np.minimum(self.cascade.draft_lengths[level - 1], room))
            self.forward(level, who, self.behind[level])
            made += self.settle(who, level, made, drafted)
        return made

    def settle(self, who: Mask, level: int, made: Ints, drafted: Ints) -> Ints:
        """Verify at one level, and note how far every level is behind; returns the gains."""
        kept = self.world.verify(who, level, made, drafted)
        gone = np.where(who, drafted - kept - 1, 0)
        self.behind -= gone
        self.behind[:level] = np.maximum(self.behind[:level], 1)
        if level < self.depth:
            self.behind[level, who] = 1
        return np.where(who, kept + 1, 0)

    def step(self) -> Ints:
        """One call of the target for every request; returns the tokens emitted."""
        offered = self.make(
            self.depth - 1, np.full(self.everyone.shape, self.cascade.draft_lengths[-1])
        )
        if self.cascade.tail:
            offered += self.make(0, np.full(self.everyone.shape, self.cascade.tail))
        self.forward(self.depth, self.everyone, offered + 1)
        emitted = self.settle(self.everyone, self.depth, np.zeros_like(offered), offered)
        for level in self.cascade.shares_target_kv:
            self.behind[level] = 1
        return emitted


def simulate(
    cascade: Cascade,
    costs: Costs,
    world: World,
    *,
    batch: int = 1,
    replicas: int = 1,
    steps: int = 1000,
) -> Prediction:
    """Run `steps` target calls of batches that never end and report the means.

    `ms_per_token` is the time between two tokens of one request; its standard error comes from
    BLOCKS blocks of consecutive steps.
    """
    run = _Run(cascade, costs, world, replicas, batch)
    tokens, times = np.zeros((2, replicas, steps))
    for step in range(steps):
        before = run.ms.sum(0)
        tokens[:, step] = run.step().mean(1)
        times[:, step] = run.ms.sum(0) - before
    total = replicas * steps
    blocks = np.array_split(np.stack([times.ravel(), tokens.ravel()]), min(BLOCKS, total), axis=1)
    rates = [block[0].sum() / block[1].sum() for block in blocks]
    return Prediction(
        ms_per_token=float(times.sum() / tokens.sum()),
        tokens_per_step=float(tokens.mean()),
        ms_per_step=float(times.mean()),
        level_ms=tuple((run.ms.sum(1) / total).tolist()),
        level_calls=tuple((run.calls.sum(1) / total).tolist()),
        stderr=float(np.std(rates, ddof=1) / np.sqrt(len(rates))) if len(rates) > 1 else 0.0,
    )
