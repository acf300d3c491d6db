"""The recursion over the levels of a cascade, independent of the runner that hosts it.

Level 0 drafts token by token; every level above verifies the draft of the one below and keeps the
token that its own verification draws ("Fast Inference via Hierarchical Speculative Decoding",
Algorithm 1), so each token carries the probabilities of the level that emitted it.
`vllm_hsd.reference.simple` is the same for one request, in plain torch. Here all requests of a
batch run together and progress raggedly; what is kept per request is an array indexed by slot.
Whatever counts, times or learns listens to the `Round`s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from vllm_hsd.core.counters import Counters
from vllm_hsd.core.draft_budget import DraftBudget
from vllm_hsd.core.drafts import DraftStore, ragged_arange, ragged_starts
from vllm_hsd.core.level_models import Forward, LevelModels
from vllm_hsd.core.levels import (
    DraftBatch,
    Level,
    LevelOptions,
    LookupLevel,
    Selection,
    Sources,
)
from vllm_hsd.core.lowest_level import LowestLevel, split_sources
from vllm_hsd.core.rounds import Round, move_thresholds
from vllm_hsd.core.schedule import room_below
from vllm_hsd.core.stopping import EntropyThresholds
from vllm_hsd.verify.chain import verify_batch, verify_greedy
from vllm_hsd.verify.coupled import verify_coupled


class Cascade:
    """Levels 0..K-1, cheapest first, drafting for a target.

    Args:
        levels: the drafters.
        options: one `LevelOptions` per level.
        num_slots: requests that can have a draft at the same time.
        horizontal_tokens: tokens of level 0 that follow the top level's draft unverified, with
            level 0's probabilities (the horizontal cascade of Chen et al., "Cascade Speculative
            Drafting for Even Faster LLM Inference").
        adaptive: a budget decides what is drafted, within the lengths of the options; else only
            between several sources of the lowest level.

    Attributes:
        levels: the model that runs at each level; None at a lowest level of lookups alone.
        models: what those models compute; fills their caches.
        drafts: one `DraftStore` per level; the last one is what the target verifies.
        counters: drafted and accepted tokens per level.
        budget: decides what is drafted; None where the lengths of the options do.
        listeners: called with every `Round`.
    """

    def __init__(
        self,
        levels: Sequence[Level | LookupLevel | Sources],
        options: Sequence[LevelOptions],
        num_slots: int,
        horizontal_tokens: int = 0,
        adaptive: bool = False,
    ) -> None:
        self.levels: list[Level | None] = []
        if levels:
            self.levels = [split_sources(levels[0])[1], *cast(Sequence[Level], levels[1:])]
        self.options = list(options)
        self.horizontal_tokens = horizontal_tokens
        lengths = [option.draft_length for option in self.options]
        if lengths:
            lengths[0] = max(lengths[0], horizontal_tokens)
        self.drafts = [DraftStore(num_slots, length) for length in lengths]
        names = levels[0].names if levels and isinstance(levels[0], Sources) else []
        self.counters = Counters.zeros(len(self.levels), names)
        self.models = LevelModels(self.levels, self.options, self.counters)
        self.budget: DraftBudget | None = None
        sources = levels[0] if levels and isinstance(levels[0], Sources) else None
        if sources is not None or (adaptive and levels):
            self.budget = DraftBudget(sources, lengths, num_slots)
        self.lowest: LowestLevel | None = None
        if options:  # trees draft with one level and none
            own = self.budget if sources is not None else None
            self.lowest = LowestLevel(levels[0], self.models, self.drafts[0], own)
        self.listeners: list[Callable[[Round], None]] = [
            self.counters.observe,
            lambda finished: move_thresholds(self.options, finished),
        ]
        if self.budget is not None:
            self.listeners.append(self.budget.observe)
        self.everything = Selection(
            tuple(range(len(self.levels))), tuple(option.draft_length for option in self.options)
        )
        self.selection = self.everything
        # The level whose drafts the target verifies, by slot.
        self.top = np.zeros(num_slots, dtype=np.int64)

    @property
    def learned(self) -> list[np.ndarray]:
        """[..., slots] float64 of what is known of each request: all that outlives its slot."""
        return [] if self.budget is None else [self.budget.acceptance.own]

    def forget(self, slot: int) -> None:
        """The slot's request has ended, or gives its slot up."""
        for lookup in self.lowest.lookups if self.lowest is not None else []:
            lookup.forget(slot)
        if self.budget is not None:
            self.budget.forget(slot)

    def propose(
        self,
        batch: DraftBatch,
        slots: np.ndarray,
        requested: np.ndarray,
        selection: Selection | None = None,
    ) -> DraftStore:
        """Draft at most requested[i] tokens for the request in slots[i].

        Args:
            batch: the requests.
            slots, requested: [n] int64.
            selection: the levels that take part, with draft lengths that are at most those of their
                options; None for all. It may depend on committed text, past acceptance and times.

        Returns:
            the top level's drafts: less than requested where a draft ended with eos, the rounds ran
            out, or the text outgrew a level.
        """
        began = time.perf_counter()
        self.selection = self.everything if selection is None else selection
        assert self.lowest is not None
        self.lowest.read(batch, slots[requested > 0])
        most = requested
        if selection is not None and selection.most is not None:
            most = np.minimum(requested, selection.most)
        own = np.where(most > 0, np.maximum(most - self.horizontal_tokens, 1), 0)
        top = self._draft(batch, len(self.levels) - 1, slots, own)
        if self.horizontal_tokens:
            last = top.token_ids[slots, np.maximum(top.counts[slots] - 1, 0)]
            ended = (top.counts[slots] == 0) | (last == batch.eos[slots])
            room = np.minimum(most - top.counts[slots], self.horizontal_tokens)
            top.extend(self._draft(batch, 0, slots, np.where(ended, 0, room)), slots)
        self.top[slots] = self.selection.levels[-1] if self.selection.levels else 0
        self._tell(
            level=self.selection.levels[-1] if self.selection.levels else 0,
            verifier=len(self.levels),
            slots=slots,
            drafts=top,
            requested=requested,
            drafting_seconds=time.perf_counter() - began,
        )
        return top

    def record_acceptance(
        self, slots: np.ndarray, accepted: np.ndarray, thresholds: EntropyThresholds
    ) -> None:
        """Take in how many tokens of its drafts the target accepted: [n] slots, [n] int64."""
        for level in np.unique(self.top[slots]).tolist():
            own = self.top[slots] == level
            self._tell(
                level=level,
                verifier=len(self.levels),
                slots=slots[own],
                drafts=self.drafts[-1],
                accepted=accepted[own],
                thresholds=thresholds,
            )

    def _tell(self, **facts: Any) -> None:
        finished = Round(**facts)
        for listener in self.listeners:
            listener(finished)

    def _draft(
        self, batch: DraftBatch, level: int, slots: np.ndarray, requested: np.ndarray
    ) -> DraftStore:
        """The drafts of one level, made anew for `slots`."""
        drafts = self.drafts[level]
        drafts.clear(slots)
        if level == 0:
            assert self.lowest is not None
            if 0 in self.selection.levels:
                verifier = next((k for k in self.selection.levels if k > 0), len(self.levels))
                self.lowest.draft(batch, slots, requested, verifier)
            return drafts
        drafting = np.zeros(len(slots), dtype=bool)
        if level in self.selection.levels:
            drafting = self.models.can_draft(batch, level, slots)
        if not drafting.all():
            # A level is left out, or the text outgrew it: the one below drafts in its place.
            out = slots[~drafting]
            most = np.minimum(requested[~drafting], self.options[level - 1].draft_length)
            drafts.extend(self._draft(batch, level - 1, out, most), out)
        if drafting.any():
            self._draft_verified(batch, level, slots[drafting], requested[drafting])
        return drafts

    def _draft_verified(
        self, batch: DraftBatch, level: int, slots: np.ndarray, requested: np.ndarray
    ) -> None:
        """Rounds of a draft from below and its verification, until requested[i] tokens are kept."""
        options, drafts, models = self.options[level], self.drafts[level], self.models
        feeder, below_length = self._feeder(level)
        open_ = requested > 0
        rounds = 0
        while open_.any() and (options.max_rounds is None or rounds < options.max_rounds):
            active = np.flatnonzero(open_)
            now = slots[active]
            start = batch.end[now]
            room = room_below(requested[active], drafts.counts[now])
            room = np.minimum(room, models.context_lengths[level] - start)
            requested_below = np.minimum(below_length, room)
            drafting_began = time.perf_counter()
            below = self._draft(batch, level - 1, now, requested_below)
            counts = below.counts[now]
            began, uncached = time.perf_counter(), int((start - batch.cached[level, now]).sum())
            forward = models.forward(batch, level, now, counts + 1)
            token_ids, accepted = self._verify(batch, level, now, below, forward)
            is_eos = (token_ids == batch.eos[now][:, None]) & (token_ids >= 0)
            ended = is_eos.any(1)
            # Nothing follows an accepted eos, not even the token drawn after it.
            last = np.where(ended, is_eos.argmax(1), accepted)
            emitted = last + 1
            batch.tokens[batch.rows[now], start + last] = token_ids[np.arange(len(now)), last]
            batch.end[now] = start + emitted
            # What was computed from the last token on belongs to rejected tokens.
            batch.cached[: level + 1, now] = np.minimum(
                batch.cached[: level + 1, now], start + last
            )
            first_row = ragged_starts(counts + 1)
            drafts.append(now, token_ids, emitted, forward.probs, first_row, level, forward.entropy)
            rounds += 1
            # Ignore the entropy of rejected positions.
            owners, offsets = ragged_arange(counts + 1)
            stopped = np.zeros(len(now), dtype=bool)
            stopped[owners[forward.uncertain & (offsets < emitted[owners])]] = True
            fits = batch.end[now] <= models.context_lengths[level]
            unfilled = drafts.counts[now] < requested[active]
            open_[active] = unfilled & fits & ~ended & ~stopped
            self._tell(
                level=feeder,
                verifier=level,
                slots=now,
                drafts=below,
                requested=requested_below,
                accepted=accepted,
                thresholds=batch.thresholds,
                computed=uncached + int(counts.sum()),
                drafting_seconds=began - drafting_began,
                verifying_seconds=time.perf_counter() - began,
            )

    def _feeder(self, level: int) -> tuple[int, int]:
        """The selected level below `level` and its draft length; 0 without one: it drafts alone."""
        place = self.selection.levels.index(level)
        if not place:
            return level - 1, 0
        return self.selection.levels[place - 1], self.selection.draft_lengths[place - 1]

    def _verify(
        self,
        batch: DraftBatch,
        level: int,
        slots: np.ndarray,
        below: DraftStore,
        forward: Forward,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Verify the drafts from below: (token ids [batch, width + 1], accepted [batch])."""
        counts, start = below.counts[slots], batch.end[slots] - below.counts[slots]
        rows = forward.logits if forward.probs is None else forward.probs
        chain = below.chain_batch(slots, counts, rows, counts, counts)
        if batch.greedy:
            return verify_greedy(chain, self.models.argmax(forward.logits, level))
        is_drawn = batch.is_drawn(slots)
        drawn, chosen = np.flatnonzero(is_drawn), np.flatnonzero(~is_drawn)
        token_ids = np.full((len(slots), chain.tokens.shape[1] + 1), -1, dtype=np.int64)
        accepted = np.zeros(len(slots), dtype=np.int64)
        if len(drawn):
            uniforms = batch.uniforms(slots[drawn], counts[drawn] + 1, level)
            token_ids[drawn], accepted[drawn] = verify_batch(
                chain.of(drawn), self.options[level].verifier, uniforms
            )

        def choose(requests: np.ndarray, t: int) -> np.ndarray:
            own = chosen[requests]
            logits = forward.logits[torch.from_numpy(chain.target_rows[own, t])]
            return self.models.choose(batch, level, logits, slots[own], start[own] + t)

        token_ids[chosen], accepted[chosen] = verify_coupled(
            chain.tokens[chosen], counts[chosen], choose
        )
        return token_ids, accepted
