"""How the lowest level of a cascade drafts: token by token, from a lookup, or from several sources.

It verifies nothing. A model draws each token from its probabilities; a lookup's tokens are point
masses; several sources follow each other in one draft, as `core.sources` chooses.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from vllm_hsd.core.drafts import DraftStore, ragged_arange, ragged_starts
from vllm_hsd.core.level_models import Forward, LevelModels, highest_probability
from vllm_hsd.core.levels import DraftBatch, FirstOf, Level, LookupLevel
from vllm_hsd.core.offers import Offers
from vllm_hsd.core.sources import SourceChoice
from vllm_hsd.core.step_times import StepTimes
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
        model_times: seconds of a forward pass of the model as one of several sources, by requests.
        times: seconds of a draft, or of a token of a model that drafts alone, by requests.
    """

    def __init__(
        self, level: Level | LookupLevel | FirstOf, models: LevelModels, drafts: DraftStore
    ) -> None:
        self.lookups, model = split_sources(level)
        self.has_model = model is not None
        self.models, self.drafts = models, drafts
        self.model_times = StepTimes()
        self.times: StepTimes | None = None
        self.choice: SourceChoice | None = None
        if isinstance(level, FirstOf):
            self.choice = SourceChoice(level, len(drafts.counts), drafts.length)

    def read(self, batch: DraftBatch, slots: np.ndarray) -> None:
        """Show the committed texts of `slots` to the lookups."""
        for lookup in self.lookups:
            lookup.read(batch.tokens, batch.rows[slots], slots, batch.end[slots])

    @property
    def model_cost(self) -> float:
        """A forward pass of the model among several sources, in steps of the verifier: a guess."""
        return 0.0 if self.choice is None else self.choice.sources.drafter_cost

    def draft(
        self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray, verifier: int
    ) -> None:
        """Draft at most requested[i] tokens for the request in slots[i]; their drafts are empty.

        Args:
            batch: the requests.
            slots, requested: [n] int64.
            verifier: the level that verifies the drafts; the number of levels for the target.
        """
        began = time.perf_counter()
        uncached = batch.end[slots] - batch.cached[0, slots]
        size, longest = int((requested > 0).sum()), int(requested.max(initial=0))
        if self.choice is not None:
            self._draft_from_sources(batch, self.choice, slots, requested, verifier)
        elif self.lookups:
            rows, ends = batch.rows[slots], batch.end[slots]
            found = self.lookups[0].lookup(batch.tokens, rows, slots, ends, requested)
            self._append_found(batch, slots, found.token_ids, found.counts)
        else:
            fits = self.models.can_draft(batch, 0, slots)
            self._draft_from_model(batch, slots[fits], requested[fits])
        if self.times is None or not size:
            return
        seconds = time.perf_counter() - began
        if not self.has_model or self.choice is not None:
            self.times.observe(size, seconds)
        elif not (uncached > longest + 1).any():
            self.times.observe(size, seconds / longest)

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
        self,
        batch: DraftBatch,
        choice: SourceChoice,
        slots: np.ndarray,
        requested: np.ndarray,
        verifier: int,
    ) -> None:
        """Drafts of lookups, each continued by the next one, and at last by the model."""
        drafts = self.drafts
        choice.price(None if batch.prices is None else batch.prices[verifier], batch.repeats)
        choice.score(batch.tokens, batch.rows[slots], slots, batch.end[slots])
        open_ = requested > 0
        sure, ended = np.ones(len(slots)), np.zeros(len(slots), dtype=bool)
        while self.lookups and open_.any():
            active = np.flatnonzero(open_)
            now = slots[active]
            rows, ends, room = batch.rows[now], batch.end[now], (requested - drafts.counts[slots])
            found = [
                lookup.lookup(batch.tokens, rows, now, ends, room[active])
                for lookup in self.lookups
            ]
            if not any(offer.counts.any() for offer in found):
                break
            offers = Offers.of(found)
            choice.remember_first(now, ends, offers, drafts.counts[now] == 0)
            source, counts, sure[active] = choice.best(
                now, offers, room[active], sure[active], drafts.counts[now]
            )
            at = np.arange(len(now))
            token_ids = offers.token_ids[source, at]
            cut, ended[active] = _until_eos(token_ids, counts, batch.eos[now])
            self._append_found(batch, now, token_ids, cut, source)
            # What is too unlikely in the best offer is not likelier in the next one.
            whole = cut == offers.counts[source, at]
            room_left = drafts.counts[now] < requested[active]
            open_[active] = (cut > 0) & whole & ~ended[active] & room_left
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
        """Add at most room[i] tokens of the model, as long as another one is worth it."""
        drafts = self.drafts
        able = self.models.can_draft(batch, 0, slots) & (room > 0)
        able[able] = choice.begins(slots[able], room[able], sure[able], drafts.counts[slots[able]])
        slots, room, sure = slots[able], room[able], sure[able]
        if not len(slots):
            return
        begin, starts = drafts.counts[slots].copy(), batch.end[slots].copy()
        catches_up = (starts - batch.cached[0, slots] > 2 * drafts.length).any()
        uniforms, first = self._uniforms(batch, slots, room)
        confidence = np.zeros((1, len(slots), drafts.length))
        open_ = np.ones(len(slots), dtype=bool)
        while open_.any():
            began = time.perf_counter()
            active = np.flatnonzero(open_)
            now, drafted = slots[active], drafts.counts[slots[active]] - begin[active]
            drawn = None if uniforms is None else uniforms[first[active] + drafted]
            forward, ended = self._draft_token(batch, now, drawn)
            confidence[0, active, drafted] = sureness = highest_probability(forward.logits)
            sure[active] *= choice.acceptance_of(now, sureness, drafted)
            open_[active] = ~ended & (drafted + 1 < room[active])
            going = np.flatnonzero(open_)
            after = drafts.counts[slots[going]]
            left = room[going] - (after - begin[going])
            open_[going] = choice.goes_on(
                slots[going], left, sure[going], after, after - begin[going]
            )
            if not catches_up:
                self.model_times.observe(len(now), time.perf_counter() - began)
            catches_up = False
        counts = drafts.counts[slots] - begin
        owners, offsets = ragged_arange(counts)
        place = (slots[owners], begin[owners] + offsets)
        drafts.source[place] = len(self.lookups)
        token_ids = np.zeros((1, len(slots), drafts.length), dtype=np.int64)
        token_ids[0, owners, offsets] = drafts.token_ids[place]
        offers = Offers(token_ids, counts[None], confidence)
        choice.remember(len(self.lookups), slots, starts, offers)

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
        """Add a token of the model to each draft.

        Args:
            batch: the requests.
            slots: [n] int64.
            uniforms: [n] float64, None where no token is drawn from probabilities.

        Returns:
            what the model says; [n] bool, drafts that end here.
        """
        one = np.ones(len(slots), dtype=np.int64)
        forward = self.models.forward(batch, 0, slots, one)
        token_ids = np.zeros(len(slots), dtype=np.int64)
        if forward.probs is not None and uniforms is not None:
            drawn = torch.from_numpy(uniforms).to(forward.probs.device)
            token_ids = BlockedCDF(forward.probs).draw(drawn).cpu().numpy()
        chosen = np.flatnonzero(~batch.is_drawn(slots))
        if len(chosen):
            own, logits = slots[chosen], forward.logits
            if len(chosen) < len(slots):
                logits = logits[torch.from_numpy(chosen)]
            token_ids[chosen] = self.models.choose(batch, 0, logits, own, batch.end[own])
        batch.tokens[batch.rows[slots], batch.end[slots]] = token_ids
        batch.end[slots] += 1
        order = np.arange(len(slots))
        self.drafts.append(slots, token_ids[:, None], one, forward.probs, order, 0, forward.entropy)
        outgrown = batch.end[slots] > self.models.context_lengths[0]
        return forward, (token_ids == batch.eos[slots]) | forward.uncertain | outgrown


def split_sources(
    level: Level | LookupLevel | FirstOf,
) -> tuple[list[LookupLevel], Level | None]:
    """The lookups of a lowest level, and its model."""
    if isinstance(level, FirstOf):
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
