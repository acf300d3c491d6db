"""How the lowest level of a cascade drafts: token by token, from a lookup, or from several sources.

It verifies nothing. A model draws each token from its probabilities; a lookup's tokens are point
masses; several sources follow each other in one draft, as `core.sources` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_hsd.core.drafts import DraftStore, ragged_arange, ragged_starts
from vllm_hsd.core.level_models import LevelModels
from vllm_hsd.core.levels import DraftBatch, FirstOf, Level, Lookup, LookupLevel
from vllm_hsd.core.sources import DRAFTER_ACCEPTANCE, SourceChoice
from vllm_hsd.verify.residual import BlockedCDF


class LowestLevel:
    """Level 0 of a cascade.

    Args:
        level: what drafts.
        models: those of the cascade; level 0 of it is the model here, if any.
        drafts: where the drafts go.

    Attributes:
        lookups: the sources without forward passes.
        has_model: one source is a model, the last one.
        choice: between several sources, None for one.
    """

    def __init__(
        self, level: Level | LookupLevel | FirstOf, models: LevelModels, drafts: DraftStore
    ) -> None:
        self.lookups, model = split_sources(level)
        self.has_model = model is not None
        self.models, self.drafts = models, drafts
        self.choice: SourceChoice | None = None
        if isinstance(level, FirstOf):
            self.choice = SourceChoice(level, len(drafts.counts), drafts.length)

    def read(self, batch: DraftBatch, slots: np.ndarray) -> None:
        """Show the committed texts of `slots` to the lookups."""
        for lookup in self.lookups:
            lookup.read(batch.tokens, batch.rows[slots], slots, batch.end[slots])

    def draft(self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray) -> None:
        """Draft at most requested[i] tokens for the request in slots[i]; their drafts are empty."""
        if self.choice is not None:
            self._draft_from_sources(batch, self.choice, slots, requested)
        elif self.lookups:
            rows, ends = batch.rows[slots], batch.end[slots]
            found = self.lookups[0].lookup(batch.tokens, rows, slots, ends, requested)
            self._append_found(batch, slots, found.token_ids, found.counts)
        else:
            fits = self.models.can_draft(batch, 0, slots)
            self._draft_from_model(batch, slots[fits], requested[fits])

    def _append_found(
        self,
        batch: DraftBatch,
        slots: np.ndarray,
        token_ids: np.ndarray,
        counts: np.ndarray,
        source: np.ndarray | int = 0,
    ) -> None:
        """Add the first counts[i] of token_ids[i] to the draft of slots[i], as point masses."""
        owners, offsets = ragged_arange(counts)
        now = slots[owners]
        batch.tokens[batch.rows[now], batch.end[now] + offsets] = token_ids[owners, offsets]
        batch.end[slots] += counts
        unknown = np.full(len(owners), np.nan)
        first = ragged_starts(counts)
        self.drafts.append(slots, token_ids, counts, None, first, 0, unknown, source)

    def _draft_from_sources(
        self, batch: DraftBatch, choice: SourceChoice, slots: np.ndarray, requested: np.ndarray
    ) -> None:
        """Drafts of lookups, each continued by the next one, and at last by the drafter."""
        drafts = self.drafts
        choice.score(batch.tokens, batch.rows[slots], slots, batch.end[slots])
        open_ = requested > 0
        sure, gained = np.ones(len(slots)), np.zeros(len(slots))
        ended = np.zeros(len(slots), dtype=bool)
        while open_.any():
            active = np.flatnonzero(open_)
            now = slots[active]
            rows, ends, room = batch.rows[now], batch.end[now], (requested - drafts.counts[slots])
            offers = [
                lookup.lookup(batch.tokens, rows, now, ends, room[active])
                for lookup in self.lookups
            ]
            choice.remember_first(now, ends, offers, drafts.counts[now] == 0)
            source, counts, accepted = choice.best(
                now, offers, room[active], sure[active], gained[active]
            )
            token_ids = _of_sources(offers, source)
            cut, ended[active] = _until_eos(token_ids, counts, batch.eos[now])
            self._append_found(batch, now, token_ids, cut, source)
            gained[active] += accepted.sum(1)
            last = accepted[np.arange(len(now)), np.maximum(cut - 1, 0)] if accepted.size else 0
            sure[active] = np.where(cut > 0, last, sure[active])
            # What is too unlikely in the best offer is not likelier in the next one.
            whole = cut == _offered(offers, source)
            room_left = drafts.counts[now] < requested[active]
            open_[active] = (cut > 0) & whole & ~ended[active] & room_left
        if self.has_model:
            self._continue_with_model(
                batch, choice, slots, np.where(ended, drafts.counts[slots], requested)
            )

    def _continue_with_model(
        self, batch: DraftBatch, choice: SourceChoice, slots: np.ndarray, requested: np.ndarray
    ) -> None:
        """Fill the drafts of `slots` up to requested[i] tokens where the drafter is worth it."""
        drafts = self.drafts
        begin = drafts.counts[slots].copy()
        used = choice.drafts(slots, requested - begin) & (requested > begin)
        choice.note_use(slots[requested > 0], used[requested > 0])
        used &= self.models.can_draft(batch, 0, slots)
        slots, requested, begin = slots[used], requested[used], begin[used]
        self._draft_from_model(batch, slots, requested)
        source = len(self.lookups)
        counts = drafts.counts[slots] - begin
        owners, offsets = ragged_arange(counts)
        token_ids = np.zeros((len(slots), drafts.length), dtype=np.int64)
        place = (slots[owners], begin[owners] + offsets)
        token_ids[owners, offsets] = drafts.token_ids[place]
        drafts.source[place] = source
        estimates = np.full(token_ids.shape, DRAFTER_ACCEPTANCE)
        starts = batch.end[slots] - counts
        choice.remember(source, slots, starts, token_ids, counts, estimates)

    def _draft_from_model(
        self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray
    ) -> None:
        """Draft until the drafts, which may have begun with looked-up tokens, are requested[i]."""
        drafts, models = self.drafts, self.models
        begin = drafts.counts[slots].copy()
        open_ = requested > begin
        if not batch.greedy:
            # All uniforms are drawn at once; leftovers after an early stop are discarded.
            room = np.maximum(requested - begin, 0)
            uniforms, first = batch.uniforms(slots, room, 0), ragged_starts(room) - begin
        while open_.any():
            active = np.flatnonzero(open_)
            now = slots[active]
            one = np.ones(len(now), dtype=np.int64)
            logits = models.forward(batch, 0, now, one)
            entropy, uncertain = models.confidence(batch, 0, logits, now)
            if batch.greedy:
                probs, token_ids = None, models.argmax(logits, 0)
            else:
                probs = models.probs(batch, 0, logits, now)
                drawn = torch.from_numpy(uniforms[first[active] + drafts.counts[now]])
                token_ids = BlockedCDF(probs).draw(drawn.to(probs.device)).cpu().numpy()
            batch.tokens[batch.rows[now], batch.end[now]] = token_ids
            batch.end[now] += 1
            drafts.append(now, token_ids[:, None], one, probs, np.arange(len(now)), 0, entropy)
            ended = (token_ids == batch.eos[now]) | uncertain
            fits = batch.end[now] <= models.context_lengths[0]
            open_[active] = (drafts.counts[now] < requested[active]) & fits & ~ended


def split_sources(
    level: Level | LookupLevel | FirstOf,
) -> tuple[list[LookupLevel], Level | None]:
    """The lookups of a lowest level, and its model."""
    if isinstance(level, FirstOf):
        return level.lookups, level.drafter
    return ([level], None) if isinstance(level, LookupLevel) else ([], level)


def _of_sources(offers: Sequence[Lookup], source: np.ndarray) -> np.ndarray:
    """[n, width] tokens of every request's chosen offer, zeros where none is chosen."""
    width = max((offer.token_ids.shape[1] for offer in offers), default=0)
    token_ids = np.zeros((len(source), width), dtype=np.int64)
    for k, offer in enumerate(offers):
        token_ids[source == k, : offer.token_ids.shape[1]] = offer.token_ids[source == k]
    return token_ids


def _offered(offers: Sequence[Lookup], source: np.ndarray) -> np.ndarray:
    """[n] tokens of every request's chosen offer, 0 where none is chosen."""
    counts = np.stack([offer.counts for offer in offers])
    return np.where(source < 0, 0, counts[source, np.arange(len(source))])


def _until_eos(
    token_ids: np.ndarray, counts: np.ndarray, eos: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Lengths [n] of drafts cut after the token that ends the request, and which hold it [n]."""
    is_eos = (token_ids == eos[:, None]) & (np.arange(token_ids.shape[1]) < counts[:, None])
    ended = is_eos.any(1)
    return np.where(ended, is_eos.argmax(1) + 1 if is_eos.size else 0, counts), ended
