"""How many tokens every level of a cascade drafted, and how many of them were accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from vllm_hsd.core.drafts import DraftStore
from vllm_hsd.core.levels import LevelStats, SourceStats
from vllm_hsd.core.rounds import Round


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

    def observe(self, finished: Round) -> None:
        """Count a round's tokens for the levels that made them, and what was requested."""
        drafts, slots = finished.drafts, finished.slots
        if finished.requested is not None:
            wanted = finished.requested > 0
            asked = self.stats[finished.level]
            asked.requested += int(wanted.sum())
            asked.empty += int((wanted & (drafts.counts[slots] == 0)).sum())
            for stats, sources, made in self._made(drafts, slots, drafts.counts[slots]):
                stats.drafted += int(made.sum())
                stats.rounds += int(made.any(1).sum())
                for source, tokens in sources:
                    source.drafted += tokens
        if finished.accepted is not None:
            for stats, sources, made in self._made(drafts, slots, finished.accepted):
                stats.accepted += int(made.sum())
                for source, tokens in sources:
                    source.accepted += tokens
        if finished.level == 0:
            self.stats[0].seconds += finished.drafting_seconds
        if finished.verifier < len(self.stats):
            self.stats[finished.verifier].seconds += finished.verifying_seconds

    def _made(
        self, drafts: DraftStore, slots: np.ndarray, counts: np.ndarray
    ) -> Iterator[tuple[LevelStats, list[tuple[SourceStats, int]], np.ndarray]]:
        """For each level its counts, those of its sources, and which tokens are its own.

        Only the first counts[i] tokens of slots[i] are looked at: [n, length] bool.
        """
        if not counts.any():
            return
        within = np.arange(drafts.length) < counts[:, None]
        for k, stats in enumerate(self.stats):
            made = within & (drafts.level[slots] == k)
            yield stats, self._by_source(drafts, slots, made) if k == 0 else [], made

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
