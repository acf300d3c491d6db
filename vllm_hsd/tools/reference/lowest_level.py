"""How the lowest level of a cascade drafts: token by token, from a lookup, or from several sources.

It verifies nothing. A model draws each token from its probabilities; a lookup's tokens are point
masses; several sources follow each other in one draft, as `tools.reference.source_choice` decides.
"""

from __future__ import annotations

import numpy as np

from vllm_hsd.budget import clock
from vllm_hsd.budget.draft_budget import DraftBudget
from vllm_hsd.cascade.drafts import DraftStore, ragged_arange, ragged_starts
from vllm_hsd.cascade.level import DraftBatch, Level, LookupLevel, LookupResult, Sources
from vllm_hsd.tools.reference.level_models import Forward, LevelModels, highest_probability
from vllm_hsd.tools.reference.source_choice import Offers, SourceChoice
from vllm_hsd.tools.reference.verified import append_own


class LowestLevel:
    """Level 0 of a cascade.

    Args:
        level: what drafts.
        models: those of the cascade; level 0 of it is the model here, if any.
        drafts: where the drafts go.
        budget: prices what several sources draft; None for one source of a given draft length.

    Attributes:
        lookups: the sources without forward passes.
        has_model: one source is a model, the last one.
        choice: decides between several sources; None for one.
    """

    def __init__(
        self,
        level: Level | LookupLevel | Sources,
        models: LevelModels,
        drafts: DraftStore,
        budget: DraftBudget | None,
    ) -> None:
        self.lookups, model = split_sources(level)
        self.has_model = model is not None
        self.models, self.drafts = models, drafts
        self.choice: SourceChoice | None = None
        if budget is not None:
            assert isinstance(level, Sources)
            self.choice = SourceChoice(level, budget, len(drafts.counts))

    def forget(self, slot: int) -> None:
        """See `Cascade.forget`."""
        for lookup in self.lookups:
            lookup.forget(slot)
        if self.choice is not None:
            self.choice.forget(slot)

    def read(self, batch: DraftBatch, slots: np.ndarray) -> None:
        """Show the committed texts of `slots` to the lookups."""
        for lookup in self.lookups:
            lookup.read(batch.texts(slots))

    def offer(
        self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray
    ) -> LookupResult | None:
        """What the best lookup would draft; None where a model drafts, too. Nothing is drafted."""
        if self.has_model:
            return None
        self.read(batch, slots)
        found = [lookup.lookup(batch.texts(slots), requested) for lookup in self.lookups]
        return found[0] if self.choice is None else self.choice.best_of(slots, found)

    def draft(
        self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray, verifier: int
    ) -> None:
        """Draft at most requested[i] tokens for the request in slots[i]; their drafts are empty.

        Args:
            batch: the requests.
            slots, requested: [n] int64.
            verifier: the level that verifies the drafts; the number of levels for the target.
        """
        if self.choice is not None:
            self._draft_from_sources(batch, self.choice, slots, requested, verifier)
        elif self.lookups:
            found = self.lookups[0].lookup(batch.texts(slots), requested)
            estimates = found.estimates
            self._append_found(batch, slots, found.token_ids, found.counts, estimates=estimates)
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
        estimates: np.ndarray | None = None,
    ) -> None:
        """Add the first counts[i] of token_ids[i] to the draft of slots[i], as point masses."""
        owners, offsets = ragged_arange(counts)
        now = slots[owners]
        batch.tokens[batch.rows[now], batch.end[now] + offsets] = token_ids[owners, offsets]
        batch.end[slots] += counts
        unknown = np.full(len(owners), np.nan)
        first = ragged_starts(counts)
        self.drafts.append(slots, token_ids, counts, None, first, 0, unknown, source, estimates)

    def _draft_from_sources(
        self,
        batch: DraftBatch,
        choice: SourceChoice,
        slots: np.ndarray,
        requested: np.ndarray,
        verifier: int,
    ) -> None:
        """Drafts of lookups, each continued by the next one, and at last by the model."""
        drafts = self.drafts
        choice.begin(verifier, batch.texts(slots))
        open_, first = requested > 0, True
        sure, ended = np.ones(len(slots)), np.zeros(len(slots), dtype=bool)
        while self.lookups and open_.any():
            active = np.flatnonzero(open_)
            now = slots[active]
            texts, room = batch.texts(now), requested - drafts.counts[slots]
            found = [lookup.lookup(texts, room[active]) for lookup in self.lookups]
            if not any(offer.counts.any() for offer in found):
                break
            offers = Offers.of(found, choice.budget.acceptance)
            if first:
                choice.remember(0, now, texts.ends, offers)
            source, counts, sure[active] = choice.best(now, offers, room[active], sure[active])
            at = np.arange(len(now))
            token_ids = offers.token_ids[source, at]
            cut, ended[active] = _until_eos(token_ids, counts, batch.eos[now])
            expected = offers.expected[source, at]
            self._append_found(batch, now, token_ids, cut, source, expected)
            # If the best lookup was truncated, the others cannot extend it: stop.
            whole = cut == offers.counts[source, at]
            room_left = drafts.counts[now] < requested[active]
            open_[active] = (cut > 0) & whole & ~ended[active] & room_left
            first = False
        if self.has_model:
            room = np.where(ended, 0, requested - drafts.counts[slots])
            self._continue_with_model(batch, choice, slots, room, sure)

    def _continue_with_model(
        self,
        batch: DraftBatch,
        choice: SourceChoice,
        slots: np.ndarray,
        room: np.ndarray,
        sure: np.ndarray,
    ) -> None:
        """Add at most room[i] tokens of the model, as long as another one pays."""
        drafts = self.drafts
        able = self.models.can_draft(batch, 0, slots) & (room > 0)
        able[able] = choice.begins(slots[able], room[able], sure[able])
        slots, room, sure = slots[able], room[able], sure[able]
        if not len(slots):
            return
        begin, starts = drafts.counts[slots].copy(), batch.end[slots].copy()
        uniforms, first_uniform = self._uniforms(batch, slots, room)
        confidence = np.zeros((len(slots), drafts.length))
        open_ = np.ones(len(slots), dtype=bool)
        while open_.any():
            began = clock.seconds()
            active = np.flatnonzero(open_)
            now, drafted = slots[active], drafts.counts[slots[active]] - begin[active]
            drawn = None if uniforms is None else uniforms[first_uniform[active] + drafted]
            forward, ended = self._draft_token(batch, now, drawn)
            confidence[active, drafted] = sureness = highest_probability(forward.logits)
            sure[active] *= choice.acceptance_of(now, sureness, drafted)
            open_[active] = ~ended & (drafted + 1 < room[active])
            going = np.flatnonzero(open_)
            after = drafts.counts[slots[going]] - begin[going]
            open_[going] = choice.goes_on(slots[going], room[going] - after, sure[going], after)
            choice.budget.pass_times.observe(forward.computed, clock.seconds() - began)
        counts = drafts.counts[slots] - begin
        owners, offsets = ragged_arange(counts)
        place = (slots[owners], begin[owners] + offsets)
        drafts.source[place] = len(self.lookups)
        token_ids = np.zeros((len(slots), drafts.length), dtype=np.int64)
        token_ids[owners, offsets] = drafts.token_ids[place]
        choice.drafter_offered(slots, starts, token_ids, counts, confidence)

    def _draft_from_model(
        self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray
    ) -> None:
        """Draft requested[i] tokens for the request in slots[i], whose draft is empty."""
        drafts = self.drafts
        open_ = requested > 0
        uniforms, first = self._uniforms(batch, slots, requested)
        while open_.any():
            active = np.flatnonzero(open_)
            now = slots[active]
            drawn = None if uniforms is None else uniforms[first[active] + drafts.counts[now]]
            _, ended = self._draft_token(batch, now, drawn)
            open_[active] = (drafts.counts[now] < requested[active]) & ~ended

    def _uniforms(
        self, batch: DraftBatch, slots: np.ndarray, most: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """Uniforms for most[i] tokens, leftovers are discarded, and where each request's begin."""
        uniforms = batch.uniforms(slots, most, 0) if batch.is_drawn(slots).any() else None
        return uniforms, ragged_starts(most)

    def _draft_token(
        self, batch: DraftBatch, slots: np.ndarray, uniforms: np.ndarray | None
    ) -> tuple[Forward, np.ndarray]:
        """Add a token of the model to each draft; see `append_own`."""
        return append_own(self.models, self.drafts, batch, 0, slots, uniforms)


def split_sources(
    level: Level | LookupLevel | Sources,
) -> tuple[list[LookupLevel], Level | None]:
    """The lookups of a lowest level, and its model."""
    if isinstance(level, Sources):
        return level.lookups, level.drafter
    return ([level], None) if isinstance(level, LookupLevel) else ([], level)


def _until_eos(
    token_ids: np.ndarray, counts: np.ndarray, eos: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Lengths [n] of drafts cut after the token that ends the request, and which hold it [n]."""
    is_eos = token_ids == eos[:, None]
    if not is_eos.any():
        return counts, np.zeros(len(counts), dtype=bool)
    is_eos &= np.arange(token_ids.shape[1]) < counts[:, None]
    ended = is_eos.any(1)
    return np.where(ended, is_eos.argmax(1) + 1 if is_eos.size else 0, counts), ended
