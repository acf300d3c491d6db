"""Discrete-event simulation of a cascade, the oracle of `planner.predict`.

A clock, batches in lock-step, and accepted lengths from tables. Several independent replicas of a
batch run side by side as numpy arrays [replicas, batch].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from vllm_hsd.planner.latencies import Role
from vllm_hsd.planner.predict import (
    Measured,
    Prediction,
    Selection,
    check_draft_lengths,
    gain_table,
)
from vllm_hsd.planner.survival import Acceptance

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

BLOCKS = 20


class TableAcceptance:
    """Accepted lengths drawn independently from survival tables; tokens carry no content.

    Arrays are [replicas, batch]; `active` selects the requests that take part, `emitted` are the
    tokens that the verifying level has emitted since its draft began.

    Args:
        rng: source of the uniforms.
    """

    def __init__(self, selection: Selection, acceptance: Acceptance, rng: np.random.Generator):
        check_draft_lengths(selection, acceptance)
        levels, lengths = selection.levels, selection.draft_lengths
        self.rng = rng
        self.reached = [
            gain_table(acceptance.survival[above, below, length]).cumsum(-1)
            for below, length, above in zip(levels, lengths, (*levels[1:], -1), strict=True)
        ]
        self.joint = None
        if levels[0] in acceptance.lookups:
            above = levels[1] if len(levels) > 1 else -1
            joint = acceptance.lookups[levels[0]][above, lengths[0]]
            self.joint = joint.reshape(len(joint), -1).cumsum(-1)
        self.found: Ints = np.zeros(0, dtype=np.int64)

    def draft(self, active: Mask) -> None:
        pass

    def look_up(self, active: Mask, emitted: Ints, requested: Ints) -> Ints:
        assert self.joint is not None
        size = len(self.joint)
        reached = self.joint[np.minimum(emitted, size - 1)]
        cell = (reached <= self.rng.random(active.shape)[..., None]).sum(-1)
        offered, self.found = np.divmod(np.minimum(cell, size * size - 1), size)
        return np.minimum(offered, requested)

    def verify(self, active: Mask, level: int, emitted: Ints, drafted: Ints) -> Ints:
        if level == 1 and self.joint is not None:
            return np.minimum(self.found, drafted)
        reached = self.reached[level - 1][emitted, drafted]
        kept = (reached <= self.rng.random(active.shape)[..., None]).sum(-1)
        return np.minimum(kept, drafted)  # rounding may leave the last sum below 1


class _Run:
    """The recursion over levels for all replicas, with their clocks."""

    def __init__(
        self,
        selection: Selection,
        measured: Measured,
        tokens: TableAcceptance,
        replicas: int,
        batch: int,
    ) -> None:
        self.selection, self.measured, self.tokens = selection, measured, tokens
        self.depth = len(selection.levels)
        self.looks_up = selection.levels[0] in measured.acceptance.lookups
        self.cacheless = [i for i, m in enumerate(selection.levels) if m in measured.cacheless]
        self.all = np.ones((replicas, batch), dtype=bool)
        self.uncached = np.ones((self.depth, replicas, batch), dtype=np.int64)
        self.ms = np.zeros((self.depth + 1, replicas))
        self.calls = np.zeros((self.depth + 1, replicas))
        self.known: dict[tuple[int, int, int], float] = {}

    def forward(self, level: int, active: Mask, tokens: Ints) -> None:
        """Advance the clocks by one forward over `tokens` of each active request."""
        requests = active.sum(1)
        running = requests > 0
        total = (tokens * active).sum(1)
        base = int(total.max()) + 1
        keys, which = np.unique(requests[running] * base + total[running], return_inverse=True)
        times = np.array([self.call(level, *divmod(key, base)) for key in keys.tolist()])
        self.ms[level, running] += times[which]
        self.calls[level, running] += 1

    def call(self, level: int, requests: int, total: int) -> float:
        key = level, requests, total
        if key not in self.known:
            model, role = -1, cast(Role, "target")
            if level < self.depth:
                model = self.selection.levels[level]
                role = self.measured.role(level, model)
            self.known[key] = self.measured.latencies.call(model, role, requests, total / requests)
        return self.known[key]

    def draft(self, level: int, requested: Ints, emitted: Ints) -> Ints:
        """Draft up to `requested` tokens of a level for each request; returns how many.

        Args:
            emitted: by the level above since its draft began.
        """
        have = np.zeros_like(requested)
        if level == 0 and self.looks_up:
            active = requested > 0
            if active.any():
                self.forward(0, active, np.ones_like(requested))
                have = np.where(active, self.tokens.look_up(active, emitted, requested), 0)
                self.uncached[1:] += have
            return have
        while (active := have < requested).any():
            if level == 0:
                self.forward(0, active, self.uncached[0])
                self.tokens.draft(active)
                self.uncached[0, active] = 1
                self.uncached[1:, active] += 1
                have += active
                continue
            room = np.where(active, requested - have - 1, 0)
            requested_below = np.minimum(self.selection.draft_lengths[level - 1], room)
            drafted = self.draft(level - 1, requested_below, have)
            self.forward(level, active, self.uncached[level])
            have += self.verify(active, level, have, drafted)
        return have

    def verify(self, active: Mask, level: int, emitted: Ints, drafted: Ints) -> Ints:
        """Verify at one level and update the uncached tokens; returns the tokens emitted."""
        kept = self.tokens.verify(active, level, emitted, drafted)
        gone = np.where(active, drafted - kept - 1, 0)
        self.uncached -= gone
        self.uncached[:level] = np.maximum(self.uncached[:level], 1)
        if level < self.depth:
            self.uncached[level, active] = 1
        return np.where(active, kept + 1, 0)

    def step(self) -> Ints:
        """One call of the target for every request; returns the tokens emitted."""
        none = np.zeros(self.all.shape, dtype=np.int64)
        requested = np.full_like(none, self.selection.draft_lengths[-1])
        offered = self.draft(self.depth - 1, requested, none)
        self.forward(self.depth, self.all, offered + 1)
        emitted = self.verify(self.all, self.depth, none, offered)
        self.uncached[self.cacheless] = 1
        return emitted


@dataclass(frozen=True)
class Simulated(Prediction):
    """Means of a simulation.

    Attributes:
        stderr: standard error of ms_per_token.
    """

    stderr: float = 0.0


def simulate(
    selection: Selection,
    measured: Measured,
    tokens: TableAcceptance,
    *,
    batch: int = 1,
    replicas: int = 1,
    steps: int = 1000,
) -> Simulated:
    """Run `steps` target calls of batches that never end and report the means.

    `ms_per_token` is the time between two tokens of one request; its standard error comes from
    BLOCKS blocks of consecutive steps.
    """
    run = _Run(selection, measured, tokens, replicas, batch)
    emitted, times = np.zeros((2, replicas, steps))
    for step in range(steps):
        before = run.ms.sum(0)
        emitted[:, step] = run.step().mean(1)
        times[:, step] = run.ms.sum(0) - before
    total = replicas * steps
    blocks = np.array_split(np.stack([times.ravel(), emitted.ravel()]), min(BLOCKS, total), axis=1)
    rates = [block[0].sum() / block[1].sum() for block in blocks]
    return Simulated(
        ms_per_token=float(times.sum() / emitted.sum()),
        tokens_per_step=float(emitted.mean()),
        ms_per_step=float(times.mean()),
        level_ms=tuple((run.ms.sum(1) / total).tolist()),
        level_calls=tuple((run.calls.sum(1) / total).tolist()),
        stderr=float(np.std(rates, ddof=1) / np.sqrt(len(rates))) if len(rates) > 1 else 0.0,
    )
