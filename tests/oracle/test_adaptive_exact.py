"""Exact distributions of whole generations whose levels and draft lengths change at every step.

Whatever selects them, as long as it looks only at committed text and earlier acceptance. Selectors
that look at a drafted token before it is verified must fail the same comparison.
"""

import zlib
from itertools import combinations
from unittest import mock

import numpy as np
import pytest
from oracle.test_cascade_exact import LEVELS, VERIFIERS, bias, build

from vllm_hsd.budget.draft_budget import DraftBudget
from vllm_hsd.cascade.level import LevelOptions, StepLevels
from vllm_hsd.tools.reference.cascade import Cascade


class Adversary(Cascade):
    """Selects by a hash of the committed text and of all accepted counts of the request so far."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.accepted = []

    def propose(self, batch, slots, requested, selection=None):
        committed = batch.tokens[batch.rows[slots[0]], : batch.end[slots[0]]].tolist()
        if len(committed) <= 3:
            self.accepted = []
        bits = zlib.crc32(repr((committed, self.accepted)).encode())
        selection, most = self.selected(bits)
        return super().propose(batch, slots, np.minimum(requested, most), selection)

    def selected(self, bits: int) -> tuple[StepLevels, int]:
        places = range(len(self.levels))
        subsets = [s for n in range(len(self.levels) + 1) for s in combinations(places, n)]
        levels = subsets[bits % len(subsets)]
        lengths = tuple(1 + (bits >> (8 + k)) % self.options[k].draft_length for k in levels)
        return StepLevels(levels, lengths), lengths[-1] if levels else 0

    def record_acceptance(self, slots, accepted, thresholds):
        self.accepted.append(accepted.tolist())
        super().record_acceptance(slots, accepted, thresholds)


class LooksAtTheDraft(Adversary):
    """Drafts, then gives the draft up because of its first token: biased."""

    def propose(self, batch, slots, requested, selection=None):
        start = batch.end[slots].copy()
        top = Cascade.propose(self, batch, slots, requested)
        drafted = top.counts[slots] > 0
        refused = slots[drafted & (top.token_ids[slots, 0] == 0)]
        top.clear(refused)
        batch.end[refused] = start[np.isin(slots, refused)]
        batch.cached[:, refused] = np.minimum(batch.cached[:, refused], batch.end[refused])
        return top


class ShortensByTheDraft(LooksAtTheDraft):
    """Cuts the draft after its first token because of the second: biased."""

    def propose(self, batch, slots, requested, selection=None):
        top = Cascade.propose(self, batch, slots, requested)
        refused = slots[(top.counts[slots] > 1) & (top.token_ids[slots, 1] == 0)]
        cut = top.counts[refused] - 1
        top.counts[refused] = 1
        batch.end[refused] -= cut
        batch.cached[:, refused] = np.minimum(batch.cached[:, refused], batch.end[refused])
        return top


class Learning(Cascade):
    """With the real budget, anew for each generation, on a clock that runs by calls."""

    def propose(self, batch, slots, requested, selection=None):
        if batch.end[slots[0]] <= 4:
            if self.budget is not None:
                self.listeners.remove(self.budget.observe)
            lengths = [option.draft_length for option in self.options]
            self.budget, self.ticks = DraftBudget(None, lengths, 1), 0
            self.listeners.append(self.budget.observe)
        with mock.patch("vllm_hsd.budget.clock.seconds", self.tick):
            self.budget.times[-1].observe(1 + self.ticks % 3, 1.0)
            offer = self.lowest.offer(batch, slots, requested)
            self.budget.step = self.budget.prices(slots, requested, True, offer=offer)
            return super().propose(batch, slots, requested, self.budget.step.selection)

    def tick(self) -> float:
        self.ticks += 1
        return float(self.ticks**2)


def bias_of(cascade, kinds, verifier, length=4) -> float:
    levels = build(kinds)
    options = [LevelOptions(1 + (k > 0), verifier) for k in range(len(levels))]
    with mock.patch("vllm_hsd.tools.reference.engine.Cascade", cascade):
        return bias(levels, options, length, verifier=verifier)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("kinds", LEVELS)
def test_any_selection_by_the_past_is_lossless(kinds, verifier):
    assert bias_of(Adversary, kinds, verifier) < 1e-9


@pytest.mark.parametrize("kinds", ["lookup, model", "model, model"])
def test_the_budget_is_lossless(kinds):
    assert bias_of(Learning, kinds, "block") < 1e-9


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("mutant", [LooksAtTheDraft, ShortensByTheDraft])
def test_a_selection_by_the_draft_is_caught(mutant, verifier):
    assert bias_of(mutant, "model, model", verifier, length=3) > 1e-3
