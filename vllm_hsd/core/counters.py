"""How many tokens every level of a cascade drafted, and how many of them were accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_hsd.core.drafts import DraftStore
from vllm_hsd.core.levels import LevelStats, SourceStats


class Counters:
    """Counts per level, and per source of the lowest level.

    Args:
        num_levels: levels of the cascade.
        sources: names of the lowest level's sources, where it has several.

    Attributes:
        stats: one entry per level, since the last `take`.
    """

    def __init__(self, num_levels: int, sources: Sequence[str] = ()) -> None:
        self.sources = list(sources)
        self.stats = [LevelStats() for _ in range(num_levels)]

    def take(self) -> list[LevelStats]:
        """The counts since the last call, one entry per level; they start again at zero."""
        taken, self.stats = self.stats, [LevelStats() for _ in self.stats]
        return taken

    def add_drafted(self, drafts: DraftStore, slots: np.ndarray) -> None:
        """Count the tokens of these drafts for the levels that made them: [n] slots."""
        counted = drafts.counts[slots]
        if not counted.any():
            return
        filled = np.arange(drafts.length) < counted[:, None]
        for k, stats in enumerate(self.stats):
            made = filled & (drafts.level[slots] == k)
            stats.drafted += int(made.sum())
            stats.rounds += int(made.any(1).sum())
            if k == 0:
                for counts, tokens in self._by_source(drafts, slots, made):
                    counts.drafted += tokens

    def add_requested(self, level: int, requested: int, empty: int) -> None:
        """Count drafts that the model above `level` could take, and those without a token."""
        stats = self.stats[level]
        stats.requested += requested
        stats.empty += empty

    def add_accepted(self, drafts: DraftStore, slots: np.ndarray, accepted: np.ndarray) -> None:
        """Count the first accepted[i] tokens of slots[i] for the levels that made them."""
        if not accepted.any():
            return
        kept = np.arange(drafts.length) < accepted[:, None]
        for k, stats in enumerate(self.stats):
            made = kept & (drafts.level[slots] == k)
            stats.accepted += int(made.sum())
            if k == 0:
                for counts, tokens in self._by_source(drafts, slots, made):
                    counts.accepted += tokens

    def _by_source(
        self, drafts: DraftStore, slots: np.ndarray, made: np.ndarray
    ) -> list[tuple[SourceStats, int]]:
        """The counts of every source, and how many of the tokens `made` [n, length] are its own."""
        found = self.stats[0].sources
        return [
            (
                found.setdefault(name, SourceStats()),
                int((made & (drafts.source[slots] == source)).sum()),
            )
            for source, name in enumerate(self.sources)
        ]
