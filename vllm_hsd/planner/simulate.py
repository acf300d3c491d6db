"""Discrete-event simulation of a cascade: a clock, a batch in lock-step, and any acceptance.

`latency.predict` gives the expectation for one request; here a batch of requests shares every
forward, so a level's loop lasts until the slowest request has its tokens.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_hsd.planner.costs import Costs, Role
from vllm_hsd.planner.latency import Cascade, Prediction, caught_up, check_reach, target_gains
from vllm_hsd.planner.optimize import gain_table

Floats = NDArray[np.float64]


class World(Protocol):
    """Where tokens come from; every call concerns one request."""

    def draft(self, request: int) -> None:
        """Level 0 appends one token."""

    def verify(self, request: int, level: int, drafted: int) -> int:
        """Level `level` (K: the target) verifies the last `drafted` tokens.

        Keeps a prefix of them, appends one token, and returns how many it kept.
        """
        ...


class Coins:
    """Tokens without content: rounds accept independently, by survival tables.

    Args:
        cascade: whose pairs of levels meet.
        survival: [M + 1, M + 1, T + 1, T + 1], see `latency.target_gains`.
        rng: source of the coins.
    """

    def __init__(self, cascade: Cascade, survival: Floats, rng: np.random.Generator):
        check_reach(cascade, survival)
        pairs = zip(cascade.levels, cascade.levels[1:], strict=False)
        self.reached = [gain_table(survival[above, below]).cumsum(-1) for below, above in pairs]
        self.reached.append([row[-1].cumsum() for row in target_gains(cascade, survival)])
        self.tail, self.top = cascade.tail, len(cascade.levels)
        self.rng = rng

    def draft(self, request: int) -> None:
        pass

    def verify(self, request: int, level: int, drafted: int) -> int:
        buffer = drafted - self.tail if level == self.top else drafted
        reached = self.reached[level - 1][buffer]
        gain = int(np.searchsorted(reached, self.rng.random(), side="right"))
        return min(gain, drafted + 1) - 1  # rounding may leave the last sum below 1


class _Run:
    """The recursion over levels for a batch, with its clock."""

    def __init__(self, cascade: Cascade, costs: Costs, world: World, batch: int):
        self.cascade, self.costs, self.world = cascade, costs, world
        self.depth = len(cascade.levels)
        self.behind = [[1] * self.depth for _ in range(batch)]
        self.ms = np.zeros(self.depth + 1)
        self.calls = np.zeros(self.depth + 1)
        self.known: dict[tuple[int, int, int], float] = {}

    def forward(self, level: int, tokens: list[int]) -> None:
        """Advance the clock by one forward over tokens[i] tokens of each active request."""
        key = level, len(tokens), sum(tokens)
        if key not in self.known:
            model = -1 if level == self.depth else self.cascade.levels[level]
            role: Role = "draft" if level == 0 else "target" if level == self.depth else "verify"
            mean = sum(tokens) / len(tokens)
            self.known[key] = self.costs.turn(model, role, len(tokens), mean)
        self.ms[level] += self.known[key]
        self.calls[level] += 1

    def make(self, level: int, want: dict[int, int]) -> dict[int, int]:
        """Level `level` makes up to want[r] tokens for each request r; returns how many."""
        made = dict.fromkeys(want, 0)
        if level == 0:
            while active := [r for r in want if made[r] < want[r]]:
                self.forward(0, [self.behind[r][0] for r in active])
                for r in active:
                    self.world.draft(r)
                    self.behind[r] = [1, *(lag + 1 for lag in self.behind[r][1:])]
                    made[r] += 1
            return made
        rounds = 0
        while active := [r for r in want if made[r] < want[r]]:
            if rounds == self.cascade.limit(level):
                break
            rounds += 1
            ask = {r: min(self.cascade.budgets[level - 1], want[r] - made[r] - 1) for r in active}
            drafted = self.make(level - 1, {r: n for r, n in ask.items() if n})
            self.forward(level, [self.behind[r][level] for r in active])
            for r in active:
                made[r] += self.settle(r, level, drafted.get(r, 0))
        return made

    def settle(self, request: int, level: int, drafted: int) -> int:
        """Verify at one level, and note how far every level is behind; returns the gain."""
        kept = self.world.verify(request, level, drafted)
        lags = self.behind[request]
        lower = caught_up(tuple(lags[:level]), drafted, kept)
        # Levels above have seen nothing of this; the end moved by kept + 1 - drafted.
        upper = [lag + kept + 1 - drafted for lag in lags[level + 1 :]]
        self.behind[request] = [*lower, *([1] if level < self.depth else []), *upper]
        return kept + 1

    def step(self) -> int:
        """One call of the target for the whole batch; returns the tokens it emitted."""
        top, requests = self.depth - 1, range(len(self.behind))
        made = self.make(top, dict.fromkeys(requests, self.cascade.budgets[top]))
        if self.cascade.tail:
            self.make(0, dict.fromkeys(requests, self.cascade.tail))
        offered = [made[r] + self.cascade.tail for r in requests]
        self.forward(self.depth, [n + 1 for n in offered])
        emitted = sum(self.settle(r, self.depth, offered[r]) for r in requests)
        for lags in self.behind:
            for level in self.cascade.shares_target_kv:
                lags[level] = 1
        return emitted


def simulate(
    cascade: Cascade, costs: Costs, world: World, *, batch: int = 1, steps: int = 1000
) -> Prediction:
    """Run `steps` target calls of a batch that never ends and report the means.

    `ms_per_token` is the time between two tokens of one request; its standard error comes from
    20 blocks of consecutive steps.
    """
    run = _Run(cascade, costs, world, batch)
    tokens, times = np.zeros(steps), np.zeros(steps)
    for step in range(steps):
        before = run.ms.sum()
        tokens[step] = run.step() / batch
        times[step] = run.ms.sum() - before
    blocks = min(20, steps)
    parts = np.array_split(np.arange(steps), blocks)
    rates = [times[part].sum() / tokens[part].sum() for part in parts]
    return Prediction(
        ms_per_token=float(times.sum() / tokens.sum()),
        tokens_per_step=float(tokens.mean()),
        ms_per_step=float(times.mean()),
        level_ms=tuple((run.ms / steps).tolist()),
        level_calls=tuple((run.calls / steps).tolist()),
        stderr=float(np.std(rates, ddof=1) / np.sqrt(blocks)) if blocks > 1 else 0.0,
    )
