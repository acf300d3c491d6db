"""How many tokens every level of a cascade drafted, and how many of them were accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Self

import numpy as np


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

    def add_time(self, level: int, seconds: float, passes: int = 0) -> None:
        """Count a lookup of a level, or so many forward passes, and their time."""
        spent, row = int(1e9 * seconds), self.rows[level]
        row[Count.ns] += spent
        row[Count.forwards] += passes
        row[Count.forward_ns] += spent if passes else 0

    def add_requests(self, level: int, requested: np.ndarray, drafted: np.ndarray) -> None:
        """Count drafts that were requested of a level: [n] tokens, and how many it gave."""
        wanted, row = requested > 0, self.rows[level]
        row[Count.requested] += wanted.sum()
        row[Count.empty] += (wanted & (drafted == 0)).sum()

    def add_source_tokens(self, column: Count, sources: np.ndarray, tokens: np.ndarray) -> None:
        """Count [n] tokens for the sources that drafted them, -1 for none."""
        known = sources >= 0
        np.add.at(self.rows[self.num_levels :, column], sources[known], tokens[known])

    def take(self) -> LevelCounts:
        """The counts since the last call; they start again at zero."""
        taken, self.rows = LevelCounts(self.rows, self.sources), np.zeros_like(self.rows)
        return taken
