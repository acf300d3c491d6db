"""Choices that switch levels and sources in and out all the time, to break what must not break."""

import zlib
from itertools import combinations

import numpy as np

from vllm_hsd.budget.draft_budget import DraftBudget
from vllm_hsd.budget.prices import Plan, Round
from vllm_hsd.cascade.level import StepLevels

FREE = np.zeros(1)


def install() -> None:
    """Replace all learned prices, and what is selected at them, in this process."""
    DraftBudget.plan = _plan


def install_free_drafts() -> None:
    """Drafts cost nothing, and searching for them gains more than it costs, however slow it was."""
    DraftBudget.plan = lambda self, *_: Plan(FREE, self.everything, gained=1e9)


def forget_holes() -> None:
    """Levels believe that they have filled every block of a prefix hit."""
    from vllm_hsd.cascade.filled_blocks import FilledBlocks

    FilledBlocks.usable = lambda self, _, length: np.full(len(self.filled), length)


def _plan(self: DraftBudget, slots: np.ndarray, *_) -> Plan:
    """Sometimes nothing is worth its price, sometimes everything is, often it depends."""
    self.calls = getattr(self, "calls", 0) + 1
    bits = zlib.crc32(str(self.calls).encode())
    tokens = np.arange(len(slots) * self.goodput[-1].widest + 1)
    price = (0.0, 0.05, 0.3, 1.0)[bits % 4] * tokens
    further = Round((0.0, 0.4, 0.7, 0.9)[bits // 4 % 4], np.full(1, 0.1), 1 + bits % 3)
    return Plan(price, _selection(self, slots, bits >> 4), further, 1e9)


def _selection(self: DraftBudget, slots: np.ndarray, bits: int) -> StepLevels:
    places = range(self.target)
    subsets = [s for n in range(self.target + 1) for s in combinations(places, n)]
    subsets = [s for s in subsets if all(self.levels[k].verifies for k in s[1:])]
    levels = subsets[bits % len(subsets)]
    lengths = tuple(1 + (bits >> (8 + k)) % self.levels[k].longest for k in levels)
    # Some requests draft less than the others, some nothing.
    most = (np.arange(len(slots)) * 7 + self.calls) % (lengths[-1] + 1 if levels else 1)
    return StepLevels(levels, lengths, most)


def install_for_batches() -> None:
    """Replace the choice of one draft length for a whole batch in this process."""
    from vllm_hsd.budget.batch_budget import BatchBudget

    def choose(self: BatchBudget, size: int) -> int:
        self.calls = getattr(self, "calls", 0) + 1
        return self.lengths[zlib.crc32(str(self.calls).encode()) % len(self.lengths)]

    BatchBudget.choose = choose


def idle() -> None:
    """As on a GPU the host reads no proposal; the scheduler has learned that no draft pays."""
    from vllm_hsd.budget.batch_budget import BatchBudget
    from vllm_hsd.config import platform

    platform.read_on_host = lambda: False
    BatchBudget.choose = lambda self, size: 0
