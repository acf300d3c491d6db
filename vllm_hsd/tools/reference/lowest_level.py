"""How the lowest level of a cascade drafts: token by token from a model, or from a lookup.

It verifies nothing. A model draws each token from its probabilities; a lookup's tokens are point
masses.
"""

from __future__ import annotations

import numpy as np

from vllm_hsd.cascade.ragged import ragged_arange, ragged_starts
from vllm_hsd.tools.lookup_level import LookupLevel
from vllm_hsd.tools.reference.batch import DraftBatch
from vllm_hsd.tools.reference.drafts import DraftStore
from vllm_hsd.tools.reference.level_models import LevelModels
from vllm_hsd.tools.reference.verified import append_own


class LowestLevel:
    """Level 0 of a cascade.

    Args:
        lookup: what drafts; None where level 0 of `models` does.
        models: those of the cascade.
        drafts: where the drafts go.
    """

    def __init__(self, lookup: LookupLevel | None, models: LevelModels, drafts: DraftStore) -> None:
        self.lookup, self.models, self.drafts = lookup, models, drafts

    def draft(self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray) -> None:
        """Draft at most requested[i] tokens for the request in slots[i]; their drafts are empty."""
        if self.lookup is None:
            fits = self.models.can_draft(batch, 0, slots)
            self._draft_from_model(batch, slots[fits], requested[fits])
            return
        found = self.lookup.lookup(batch.texts(slots), requested)
        owners, offsets = ragged_arange(found.counts)
        now = slots[owners]
        batch.tokens[batch.rows[now], batch.end[now] + offsets] = found.token_ids[owners, offsets]
        batch.end[slots] += found.counts
        first, unknown = ragged_starts(found.counts), np.full(len(owners), np.nan)
        self.drafts.append(slots, found.token_ids, found.counts, None, first, 0, unknown)

    def _draft_from_model(
        self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray
    ) -> None:
        drafts, open_, first = self.drafts, requested > 0, ragged_starts(requested)
        # Those that are left over are discarded.
        uniforms = None if batch.greedy else batch.uniforms(slots, requested, 0)
        while open_.any():
            active = np.flatnonzero(open_)
            now = slots[active]
            drawn = None if uniforms is None else uniforms[first[active] + drafts.counts[now]]
            ended = append_own(self.models, drafts, batch, 0, now, drawn)
            open_[active] = (drafts.counts[now] < requested[active]) & ~ended
