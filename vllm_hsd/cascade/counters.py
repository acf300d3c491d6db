"""How many tokens every level of a cascade drafted, and how many of them were accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Self

import numpy as np

from vllm_hsd.cascade.branch_store import BranchStore
from vllm_hsd.cascade.drafts import DraftStore
from vllm_hsd.cascade.rounds import Round


class Count(IntEnum):
    """Columns of `LevelCounts.rows`; the first three are also those of the device.

    A level proposed `drafted` tokens in `rounds` drafts to the next model up, which had requested
    `requested` drafts, `empty` of which got no token. Beside its drafts `branches` with
    `branch_tokens` were verified; the text followed `branches_followed` of them, which gave
    `followed_tokens` more. `ns` nanoseconds went into its forward passes (`forward_ns`), lookups
    and verifications.
    """

    drafted = 0
    accepted = 1
    rounds = 2
    forwards = 3
    forward_ns = 4
    requested = 5
    empty = 6
    ns = 7
    branches = 8
    branch_tokens = 9
    branches_followed = 10
    followed_tokens = 11


@dataclass
class LevelCounts:
    """Counts of the levels, and of the lowest level's sources where it has several.

    Attributes:
        rows: [levels + sources, len(Count)] int64, levels cheapest first.
        sources: names of the sources.
    """

    rows: np.ndarray
    sources: list[str] = field(default_factory=list)

    @classmethod
    def zeros(cls, num_levels: int, sources: Sequence[str] = ()) -> Self:
        """Nothing counted yet."""
        return cls(np.zeros((num_levels + len(sources), len(Count)), np.int64), list(sources))

    @property
    def num_levels(self) -> int:
        """Rows that belong to levels."""
        return len(self.rows) - len(self.sources)

    def take(self) -> LevelCounts:
        """The counts since the last call; they start again at zero."""
        taken, self.rows = LevelCounts(self.rows, self.sources), np.zeros_like(self.rows)
        return taken


class Counters(LevelCounts):
    """Counts what a cascade's rounds tell."""

    def observe(self, finished: Round) -> None:
        """Count a round's tokens for the levels that made them, and what was requested."""
        drafts, slots = finished.drafts, finished.slots
        if finished.requested is not None:
            wanted = finished.requested > 0
            self.rows[finished.level, Count.requested] += wanted.sum()
            self.rows[finished.level, Count.empty] += (wanted & (drafts.counts[slots] == 0)).sum()
            # Those that a level passes on unverified count where they are verified.
            if finished.accepted is not None or finished.verifier == self.num_levels:
                self._count(Count.drafted, drafts, slots, drafts.counts[slots])
        if finished.accepted is not None:
            self._count(Count.accepted, drafts, slots, finished.accepted)
        if finished.level == 0:
            self.rows[0, Count.ns] += int(1e9 * finished.drafting_seconds)
        if finished.verifier < self.num_levels:
            self.rows[finished.verifier, Count.ns] += int(1e9 * finished.verifying_seconds)

    def _count(
        self, column: Count, drafts: DraftStore, slots: np.ndarray, counts: np.ndarray
    ) -> None:
        """Count the first counts[i] tokens of slots[i] for the levels and sources they are of."""
        if not counts.any():
            return
        within = np.arange(drafts.length) < counts[:, None]
        level, source = drafts.level[slots], drafts.source[slots]
        for row in range(len(self.rows)):
            k = row - self.num_levels
            made = within & (level == row if k < 0 else (level == 0) & (source == k))
            self.rows[row, column] += made.sum()
            if column == Count.drafted:
                self.rows[row, Count.rounds] += made.any(1).sum()

    def count_branches(
        self, branches: BranchStore, slots: np.ndarray, winner: np.ndarray, more: np.ndarray
    ) -> None:
        """Count branches of the target's step for level 0, and for the sources that they are of.

        Args: see `Cascade.record_branches`.
        """
        counts, of = branches.counts[slots], branches.source[slots]
        verified = counts - branches.shared[slots]
        won = winner[:, None] == 1 + np.arange(counts.shape[1])
        for row in (0, *range(self.num_levels, len(self.rows))):
            own = np.full(of.shape, True) if row == 0 else of == row - self.num_levels
            self.rows[row, Count.branches] += (own & (counts > 0)).sum()
            self.rows[row, Count.branch_tokens] += verified[own].sum()
            self.rows[row, Count.branches_followed] += (own & won).sum()
            self.rows[row, Count.followed_tokens] += ((own & won).any(1) * more).sum()
