"""The recursion over the levels of a cascade, independent of the runner that hosts it.

Level 0 drafts token by token; every level above verifies the draft of the one below and keeps the
token that its own verification draws ("Fast Inference via Hierarchical Speculative Decoding",
Algorithm 1), so each token carries the probabilities of the level that emitted it.
`tools.reference.simple` is the same for one request, in plain torch. Here all requests of a batch
run together and progress raggedly; what is kept per request is an array indexed by slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_hsd.cascade.counters import Count, LevelCounts
from vllm_hsd.cascade.level import LevelOptions, StepLevels
from vllm_hsd.tools.lookup_level import LookupLevel
from vllm_hsd.tools.reference.batch import DraftBatch, Level
from vllm_hsd.tools.reference.drafts import DraftStore
from vllm_hsd.tools.reference.level_models import LevelModels
from vllm_hsd.tools.reference.lowest_level import LowestLevel
from vllm_hsd.tools.reference.stopping import EntropyThresholds
from vllm_hsd.tools.reference.verified import append_unverified, verify


class Cascade:
    """Levels 0..K-1, cheapest first, drafting for a target.

    Args:
        levels: the drafters.
        options: one `LevelOptions` per level.
        num_slots: requests that can have a draft at the same time.
        horizontal_tokens: tokens of level 0 that follow the top level's draft unverified, with
            level 0's probabilities (the horizontal cascade of Chen et al., "Cascade Speculative
            Drafting for Even Faster LLM Inference").

    Attributes:
        levels: the model that runs at each level; None at a lowest level that looks up.
        models: what those models compute; fills their caches.
        drafts: one `DraftStore` per level; the last one is what the target verifies.
        counts: of the levels.
    """

    def __init__(
        self,
        levels: Sequence[Level | LookupLevel],
        options: Sequence[LevelOptions],
        num_slots: int,
        horizontal_tokens: int = 0,
    ) -> None:
        lengths = [option.draft_length for option in options]
        self.everything = self.selection = StepLevels(tuple(range(len(levels))), tuple(lengths))
        lengths[0] = max(lengths[0], horizontal_tokens)
        self.lookup = levels[0] if isinstance(levels[0], LookupLevel) else None
        self.levels = [None if isinstance(each, LookupLevel) else each for each in levels]
        self.options, self.horizontal_tokens = list(options), horizontal_tokens
        self.drafts = [DraftStore(num_slots, length) for length in lengths]
        self.counts = LevelCounts.zeros(len(levels))
        self.models = LevelModels(self.levels, self.options, self.counts)
        self.lowest = LowestLevel(self.lookup, self.models, self.drafts[0])

    def forget(self, slot: int) -> None:
        """The slot's request has ended, or gives its slot up."""
        if self.lookup is not None:
            self.lookup.forget(slot)

    def propose(
        self,
        batch: DraftBatch,
        slots: np.ndarray,
        requested: np.ndarray,
        selection: StepLevels | None = None,
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
        self.selection = selection or self.everything
        if self.lookup is not None:
            self.lookup.read(batch.texts(slots[requested > 0]))
        if not self.selection.levels:
            requested = np.zeros_like(requested)
        most = requested
        if self.selection.most is not None:
            most = np.minimum(requested, self.selection.most)
        own = np.where(most > 0, np.maximum(most - self.horizontal_tokens, 1), 0)
        top = self._draft(batch, len(self.levels) - 1, slots, own)
        if self.horizontal_tokens:
            last = top.token_ids[slots, np.maximum(top.counts[slots] - 1, 0)]
            ended = (top.counts[slots] == 0) | (last == batch.eos[slots])
            room = np.minimum(most - top.counts[slots], self.horizontal_tokens)
            top.extend(self._draft(batch, 0, slots, np.where(ended, 0, room)), slots)
        self.counts.add_requests(self.selection.top, most, top.counts[slots])
        self._count(Count.drafted, top, slots, top.counts[slots])
        return top

    def record_acceptance(
        self, slots: np.ndarray, accepted: np.ndarray, thresholds: EntropyThresholds
    ) -> None:
        """Take in how many tokens of its drafts the target accepted: [n] slots, [n] int64."""
        self._count(Count.accepted, self.drafts[-1], slots, accepted)
        self._move_thresholds(self.drafts[-1], slots, accepted, thresholds)

    def _draft(
        self, batch: DraftBatch, level: int, slots: np.ndarray, requested: np.ndarray
    ) -> DraftStore:
        """The drafts of one level, made anew for `slots`."""
        drafts, takes_part = self.drafts[level], level in self.selection.levels
        drafts.clear(slots)
        if level == 0:
            if takes_part:
                self.lowest.draft(batch, slots, requested)
            return drafts
        drafting = self.models.can_draft(batch, level, slots) & takes_part
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
        """Rounds of a draft from below and its verification, until requested[i] tokens are kept.

        A level whose verifier is "none" keeps all of the draft and adds a token.
        """
        drafts, most = self.drafts[level], self.options[level].max_rounds
        context_length = self.models.context_lengths[level]
        _, below_length = self.selection.below(level)
        open_ = requested > 0
        rounds = 0
        while open_.any() and (most is None or rounds < most):
            active = np.flatnonzero(open_)
            now = slots[active]
            # One place is kept for the token that the level's own verification draws.
            room = requested[active] - drafts.counts[now] - 1
            room = np.minimum(room, context_length - batch.end[now])
            requested_below = np.minimum(below_length, room)
            below = self._draft(batch, level - 1, now, requested_below)
            ended = self._verify(batch, level, now, requested_below, below)
            fits = batch.end[now] <= context_length
            open_[active] = (drafts.counts[now] < requested[active]) & fits & ~ended
            rounds += 1

    def _verify(
        self,
        batch: DraftBatch,
        level: int,
        slots: np.ndarray,
        requested: np.ndarray,
        below: DraftStore,
    ) -> np.ndarray:
        """Keep what a level accepts of drafts and a token of its own; [n] bool, which ones end."""
        drafts, models = self.drafts[level], self.models
        self.counts.add_requests(self.selection.below(level)[0], requested, below.counts[slots])
        if self.options[level].verifier == "none":
            return append_unverified(models, drafts, batch, level, slots, below)
        accepted, ended = verify(models, drafts, batch, level, slots, below)
        # Those that a level passes on unverified count where they are verified.
        self._count(Count.drafted, below, slots, below.counts[slots])
        self._count(Count.accepted, below, slots, accepted)
        self._move_thresholds(below, slots, accepted, batch.thresholds)
        return ended

    def _move_thresholds(
        self,
        drafts: DraftStore,
        slots: np.ndarray,
        accepted: np.ndarray,
        thresholds: EntropyThresholds,
    ) -> None:
        """Take in the entropies at the first rejected tokens of drafts."""
        rejected = accepted < drafts.counts[slots]
        place = (slots[rejected], accepted[rejected])
        for level, option in enumerate(self.options):
            own = drafts.level[place] == level
            if option.stopping == "entropy" and own.any():
                entropy = drafts.entropy[place][own]
                thresholds.observe_rejection(level, slots[rejected][own], entropy)

    def _count(
        self, column: Count, drafts: DraftStore, slots: np.ndarray, counts: np.ndarray
    ) -> None:
        """Count the first counts[i] tokens of slots[i] for the levels that made them."""
        within = np.arange(drafts.length) < counts[:, None]
        for level, row in enumerate(self.counts.rows):
            made = within & (drafts.level[slots] == level)
            row[column] += made.sum()
            if column == Count.drafted:
                row[Count.rounds] += made.any(1).sum()
