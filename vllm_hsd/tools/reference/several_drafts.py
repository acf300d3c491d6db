"""A lowest level whose model drafts several rows for one pass of the target.

They are drawn independently of each other, whole, and verified together (`rules.branches`; Zhou et
al., "Overcoming Joint Intractability with Lossless Hierarchical Speculative Decoding", Table 2;
Stratos, "Speculative Sampling", section 2). At temperature 0, or with the noise of a seed, they
would be equal: there the further ones begin with the likeliest other tokens, as point masses.
"""

from __future__ import annotations

import numpy as np

from vllm_hsd.cascade.branch_store import BranchStore
from vllm_hsd.cascade.drafts import DraftStore
from vllm_hsd.cascade.level import DraftBatch, Level
from vllm_hsd.tools.reference.level_models import Forward, LevelModels
from vllm_hsd.tools.reference.lowest_level import LowestLevel
from vllm_hsd.tools.reference.verified import append_next


class SeveralDrafts(LowestLevel):
    """Level 0 of a cascade without other levels, that fills a `BranchStore` beside its drafts.

    Args:
        level: the model.
        models, drafts: see `LowestLevel`.
        branches: where further drafts go.
    """

    def __init__(
        self, level: Level, models: LevelModels, drafts: DraftStore, branches: BranchStore
    ) -> None:
        super().__init__(level, models, drafts, None)
        self.branches = branches

    def draft(
        self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray, verifier: int
    ) -> None:
        """See `LowestLevel.draft`."""
        models, store = self.models, self.branches
        store.clear(slots)
        able = models.can_draft(batch, 0, slots) & (requested > 0)
        slots, requested = slots[able], requested[able]
        if not len(slots):
            return
        starts, one = batch.end[slots].copy(), np.ones(len(slots), dtype=np.int64)
        # All rows begin after the same text.
        first = models.forward(batch, 0, slots, one)
        room = np.minimum(requested, store.room[slots])
        store.drawn[slots] = batch.is_drawn(slots)
        for row in range(len(store.drafts), 0, -1):
            self._draft_row(batch, store.drafts[row - 1], slots, room, first, row)
            batch.end[slots] = starts
            batch.cached[0, slots] = np.minimum(batch.cached[0, slots], starts)
        # The chain comes last: its tokens are what the model's cache holds then.
        self._draft_row(batch, self.drafts, slots, requested, first, 0)
        store.share(self.drafts, slots)

    def _draft_row(
        self,
        batch: DraftBatch,
        drafts: DraftStore,
        slots: np.ndarray,
        most: np.ndarray,
        first: Forward,
        row: int,
    ) -> None:
        """Draft at most most[i] tokens after the text in slots[i], whose draft is empty."""
        uniforms, begin = self._uniforms(batch, slots, most)
        open_, rank = most > 0, row
        forward = first.of(np.flatnonzero(open_))
        while open_.any():
            active = np.flatnonzero(open_)
            now = slots[active]
            drawn = None if uniforms is None else uniforms[begin[active] + drafts.counts[now]]
            ended = append_next(self.models, drafts, batch, 0, now, drawn, forward, rank)
            open_[active] = (drafts.counts[now] < most[active]) & ~ended
            now, rank = slots[open_], 0
            if len(now):
                one = np.ones(len(now), dtype=np.int64)
                forward = self.models.forward(batch, 0, now, one)
