"""Which levels draft in the next step, and how many tokens for each request.

The selection maximizes the goodput: expected tokens of the whole batch per second of the step,
drafting included. Not to speculate is always a candidate. Everything it looks at is in the past
(times, acceptance) or is committed text, never a token or uniform that is still to be verified: a
draft's length is then a stopping time, and the text keeps the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import numpy as np

from vllm_hsd.core.acceptance import AcceptanceEstimates
from vllm_hsd.core.levels import Selection
from vllm_hsd.core.step_times import StepTimes

# Steps between two full plans; in between, requests are measured against the last plan's threshold.
_PLAN_EVERY = 16
# Steps for which draft lengths are kept while neither the plan nor the requests change.
_LENGTHS_EVERY = 4
# Steps of one trial, and pauses before a candidate that lost is tried again.
_TRIAL_STEPS, _FIRST_PAUSE, _LONGEST_PAUSE = 3, 64, 4096
# Steps before the first trials where what is known was measured before serving.
_SEEDED_STEPS = 32
# One request in so many takes part in a trial: that tells enough, and costs little.
_TRIAL_SPARES = 8
# Trials may cost this share of the time.
_TRIAL_SHARE = 0.005
# A plan changes for a gain of at least this much: estimates are noisy.
_HYSTERESIS = 1.01


@dataclass(eq=False)
class _Candidate:
    """A sub-cascade, and when it is tried.

    Attributes:
        selection: with the best draft lengths of the last plan.
        goodput: expected tokens per second of the last plan.
        threshold: least survival probability of a token worth drafting in the last plan.
        seconds: expected seconds of a step of the last plan.
        runs, last_run: steps with it, and the number of the last one.
        pause: steps to wait before it is tried again.
    """

    levels: tuple[int, ...]
    selection: Selection = field(default_factory=Selection)
    goodput: float = 0.0
    threshold: float = 0.0
    seconds: float = 0.0
    runs: int = 0
    last_run: int = 0
    pause: int = _FIRST_PAUSE


class DepthController:
    """Chooses the levels and draft lengths of every step.

    Args:
        draft_lengths: most tokens per level, cheapest first; the last is also the most that the
            target verifies.
        is_lookup: per level, whether it drafts without forward passes.
        num_slots: requests at the same time.
        max_tokens: most tokens of a forward pass.

    Attributes:
        target_times: seconds of the target's step by tokens in the batch.
        level_times: per level, seconds of a forward pass by its tokens; of a lookup by requests.
        acceptance: estimates per pair (level, level or target that verifies it), see `pair`.
        seeded: all of them began with measurements, so that no candidate needs a trial at once.
    """

    def __init__(
        self,
        draft_lengths: Sequence[int],
        is_lookup: Sequence[bool],
        num_slots: int,
        max_tokens: int,
    ) -> None:
        count = len(draft_lengths)
        self.draft_lengths = list(draft_lengths)
        self.is_lookup = list(is_lookup)
        self.longest = max(draft_lengths)
        most = max(max_tokens, num_slots * (self.longest + 1))
        self.target_times = StepTimes(most)
        self.level_times = [StepTimes(most) for _ in draft_lengths]
        pairs = [(low, high) for low in range(count) for high in range(low + 1, count + 1)]
        self.pairs = {pair: i for i, pair in enumerate(pairs)}
        self.acceptance = AcceptanceEstimates(len(pairs), num_slots, self.longest)
        self.facing_target = [self.pairs[level, count] for level in range(count)]
        self.plain = _Candidate(())
        self.candidates = [self.plain] + [
            _Candidate(levels)
            for size in range(1, count + 1)
            for levels in combinations(range(count), size)
        ]
        self.seeded = False
        self.best = self.plain
        self.trial: _Candidate | None = None
        self.trial_left = 0
        self.allowance = 0.0
        self.step = 0
        self.next_plan = 0
        self.planned_size = 0
        # What the last look at the requests found, its step, for which candidate and requests.
        self.worth = np.zeros(0, dtype=np.int64)
        self.looked = 0
        self.looked_at: tuple[_Candidate, bytes, int] | None = None

    def pair(self, level: int, verifier: int) -> int:
        """Index of the drafts of `level` verified by level `verifier` in `acceptance`.

        The target is level len(draft_lengths).
        """
        return self.pairs[level, verifier]

    def choose(self, slots: np.ndarray, most: np.ndarray) -> tuple[Selection, np.ndarray]:
        """The levels of the next step, and the draft length of every request.

        Args:
            slots: [n] int64 requests that may draft.
            most: [n] int64 most tokens for each.

        Returns:
            (the selection, [n] int64 draft lengths, at most `most`).
        """
        self.step += 1
        size = len(slots)
        if not size or not most.any():
            return Selection(), np.zeros(size, dtype=np.int64)
        candidate = self._candidate(slots, most)
        candidate.runs += 1
        candidate.last_run = self.step
        if self.plain.goodput:
            self.allowance += _TRIAL_SHARE * self.best.seconds
        lengths = np.minimum(self._worth(candidate, slots), most)
        if candidate is self.trial:
            count = max(size // _TRIAL_SPARES, 1)
            turn = (np.arange(size) - self.step * count) % size
            lengths[turn >= count] = 0
        return (candidate.selection if lengths.any() else Selection()), lengths

    def _candidate(self, slots: np.ndarray, most: np.ndarray) -> _Candidate:
        """What runs in this step: the trial in progress, a new one, or the best known."""
        size = len(slots)
        if self.trial is not None and self.trial_left:
            self.trial_left -= 1
            return self.trial
        if not self.target_times.knows(size):
            # The time without drafts is what everything is measured against.
            return self.plain
        if self.trial is not None:
            self.next_plan = self.step
        moved = not 0.8 < size / max(self.planned_size, 1) < 1.25
        if self.step >= self.next_plan or moved:
            self._plan(slots, most)
            due = self._due(size)
            if due is not None:
                self.trial, self.trial_left = due, _TRIAL_STEPS - 1
                return due
        return self.best

    def _plan(self, slots: np.ndarray, most: np.ndarray) -> None:
        """Value every candidate at this batch, and judge the trial that has ended."""
        self.looked_at = None
        self.next_plan = self.step + _PLAN_EVERY
        self.planned_size = len(slots)
        known = [candidate for candidate in self.candidates if self._timed(candidate)]
        for candidate in known:
            self._value(candidate, slots, most)
        best = max(known, key=lambda candidate: candidate.goodput)
        if best.goodput < _HYSTERESIS * self.plain.goodput:
            self.best = self.plain
        elif self.best not in known or best.goodput > _HYSTERESIS * self.best.goodput:
            self.best = best
        if self.trial is not None:
            won = self.best is self.trial
            longer = min(2 * self.trial.pause, _LONGEST_PAUSE)
            self.trial.pause = _FIRST_PAUSE if won else longer
            self.trial = None

    def _timed(self, candidate: _Candidate) -> bool:
        return all(not self.level_times[level].empty for level in candidate.levels)

    def _due(self, size: int) -> _Candidate | None:
        """The candidate to be tried now, if any."""
        for candidate in self.candidates:
            if candidate is self.best:
                continue
            idle = self.step - candidate.last_run
            if not candidate.runs and (idle > _SEEDED_STEPS or not self.seeded):
                # Bounded: every sub-cascade is tried once, whatever it costs.
                candidate.selection = self._first_selection(candidate.levels)
                candidate.threshold = 0.0
                return candidate
            rested = idle >= candidate.pause
            shortfall = 1 - candidate.goodput / self.best.goodput
            cost = _TRIAL_STEPS * candidate.seconds * shortfall / min(size, _TRIAL_SPARES)
            if rested and cost <= self.allowance:
                self.allowance -= cost
                if not candidate.selection.levels and candidate.levels:
                    candidate.selection = self._first_selection(candidate.levels)
                    candidate.threshold = 0.0
                return candidate
        return None

    def _first_selection(self, levels: tuple[int, ...]) -> Selection:
        """Short drafts, for a candidate of which nothing is known."""
        lengths = tuple(min(self.draft_lengths[level], 3 + i) for i, level in enumerate(levels))
        return Selection(levels, lengths)

    def _worth(self, candidate: _Candidate, slots: np.ndarray) -> np.ndarray:
        """[n] tokens of each request that are likely enough to survive, as of a recent step."""
        looked_at = candidate, slots.tobytes(), self.acceptance.arrivals
        steps = self.step - self.looked
        if steps < _LENGTHS_EVERY and looked_at == self.looked_at:
            return self.worth
        self.looked, self.looked_at = self.step, looked_at
        if not candidate.selection.levels:
            self.worth = np.zeros(len(slots), dtype=np.int64)
            self.acceptance.rest(self.facing_target, slots, steps)
            return self.worth
        top = candidate.levels[-1]
        survival = self.acceptance.survival(self.facing_target[top], slots)
        worth = (survival >= candidate.threshold).sum(1)
        self.worth = np.minimum(worth, candidate.selection.draft_lengths[-1])
        self.acceptance.rest(self.facing_target, slots[self.worth == 0], steps)
        others = [pair for level, pair in enumerate(self.facing_target) if level != top]
        self.acceptance.rest(others, slots[self.worth > 0], steps)
        return self.worth

    def _value(self, candidate: _Candidate, slots: np.ndarray, most: np.ndarray) -> None:
        """Best draft lengths of a candidate, its goodput and its threshold."""
        size = len(slots)
        plain = self.target_times.seconds(size)
        candidate.selection, candidate.threshold = Selection(), np.inf
        candidate.seconds, candidate.goodput = plain, size / plain
        if not candidate.levels:
            return
        top = candidate.levels[-1]
        pair = self.pair(top, len(self.draft_lengths))
        fill = self.acceptance.fill(pair)
        lengths, drafting = self._drafting_seconds(candidate.levels, size)
        longest = min(int(most.max()), self.draft_lengths[-1], self.draft_lengths[top])
        ladder = np.array(_ladder(longest))
        # [draft lengths, tokens] survival of every token that may be drafted, best first, then 0.
        room = np.minimum(most, longest)
        survival = self.acceptance.survival(pair, slots)[:, :longest]
        survival = np.where(np.arange(longest) < room[:, None], survival, 0.0)
        within = np.arange(longest) < ladder[:, None, None]
        gains = -np.sort(-np.where(within, survival, 0.0).reshape(len(ladder), -1))
        gains = gains[:, : int(room.sum())]
        tokens = np.arange(1, gains.shape[1] + 1)
        seconds = self.target_times.seconds(size + fill * tokens) + drafting[ladder][:, None]
        goodput = (size + fill * np.cumsum(gains, axis=1)) / seconds
        best = divmod(int(goodput.argmax()), gains.shape[1])
        candidate.goodput = float(goodput[best])
        candidate.threshold, candidate.seconds = float(gains[best]), float(seconds[best])
        candidate.selection = Selection(candidate.levels, (*lengths, int(ladder[best[0]])))

    def _drafting_seconds(
        self, levels: tuple[int, ...], size: int
    ) -> tuple[tuple[int, ...], np.ndarray]:
        """Draft lengths of all levels but the last, and seconds by the last one's draft length.

        The seconds are [longest + 1]. Every level takes from the one below as many tokens as make
        its own cheapest ("Fast Inference via Hierarchical Speculative Decoding", section 4: a
        renewal of rounds, each worth its expected emitted tokens).
        """
        tokens = np.arange(self.longest + 1)
        lowest = self.level_times[levels[0]].seconds(size)
        seconds = np.full(len(tokens), lowest) if self.is_lookup[levels[0]] else lowest * tokens
        chosen: list[int] = []
        for below, level in pairwise(levels):
            pair = self.pair(below, level)
            n = np.arange(1, self.draft_lengths[below] + 1)
            survival = np.cumprod(1 - self.acceptance.hazard(pair))[: len(n)]
            emitted = 1 + self.acceptance.fill(pair) * np.cumsum(survival)
            rounds = seconds[n] + self.level_times[level].seconds(size * (n + 1))
            cheapest = int((rounds / emitted).argmin())
            chosen.append(int(n[cheapest]))
            seconds = rounds[cheapest] * np.maximum(tokens / emitted[cheapest], 1.0)
        return tuple(chosen), seconds


def _ladder(longest: int) -> list[int]:
    """Draft lengths that are compared: 1, 2, 3, 4, 6, 8, 12, ... and the longest."""
    steps = [length for base in range(8) for length in (2**base, 3 * 2**base // 2)]
    return sorted({length for length in steps if 0 < length < longest} | {longest})
