"""The recursion over the levels of a cascade, independent of the runner that hosts it.

Level 0 drafts token by token; every level above verifies the draft of the one below and keeps the
token that its own verification draws ("Fast Inference via Hierarchical Speculative Decoding",
Algorithm 1), so each token carries the probabilities of the level that emitted it.
`simple` beside this file is the same for one request, in plain torch. Here all requests of a batch
run together and progress raggedly; what is kept per request is an array indexed by slot.
Whatever counts, times or learns listens to the `Round`s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from vllm_hsd.budget import clock
from vllm_hsd.budget.draft_budget import DraftBudget
from vllm_hsd.cascade.branch_store import BranchStore
from vllm_hsd.cascade.counters import Counters
from vllm_hsd.cascade.drafts import DraftStore, room_below
from vllm_hsd.cascade.level import (
    DraftBatch,
    Level,
    LevelOptions,
    LookupLevel,
    Sources,
    StepLevels,
)
from vllm_hsd.cascade.rounds import Round, move_thresholds
from vllm_hsd.cascade.stopping import EntropyThresholds
from vllm_hsd.tools.reference.branching import BranchingLevel
from vllm_hsd.tools.reference.level_models import LevelModels
from vllm_hsd.tools.reference.lowest_level import LowestLevel, split_sources
from vllm_hsd.tools.reference.several_drafts import SeveralDrafts
from vllm_hsd.tools.reference.verified import append_unverified, append_verified, verify


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
        branches: drafts of a request that the target verifies together, at most.

    Attributes:
        levels: the model that runs at each level; None at a lowest level of lookups alone.
        models: what those models compute; fills their caches.
        drafts: one `DraftStore` per level; the last one is what the target verifies.
        branches: what the target verifies beside those; None without branches.
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
        branches: int = 1,
    ) -> None:
        sources = levels[0] if isinstance(levels[0], Sources) else None
        lengths = [option.draft_length for option in options]
        self.everything = self.selection = StepLevels(tuple(range(len(levels))), tuple(lengths))
        lengths[0] = max(lengths[0], horizontal_tokens)
        self.levels = [split_sources(levels[0])[1], *cast(Sequence[Level], levels[1:])]
        self.options, self.horizontal_tokens = list(options), horizontal_tokens
        self.drafts = [DraftStore(num_slots, length) for length in lengths]
        self.branches = BranchStore(num_slots, branches, lengths[-1]) if branches > 1 else None
        self.counters = Counters.zeros(len(levels), sources.names if sources else [])
        self.models = LevelModels(self.levels, self.options, self.counters)
        self.budget = DraftBudget(sources, lengths, num_slots) if sources or adaptive else None
        own, lowest = self.budget if sources else None, (self.models, self.drafts[0])
        self.lowest = LowestLevel(levels[0], *lowest, own)
        if self.branches is not None:
            if sources is not None and own is not None:
                self.lowest = BranchingLevel(sources, *lowest, own, self.branches)
            elif self.levels[0] is not None:
                self.lowest = SeveralDrafts(self.levels[0], *lowest, self.branches)
        self.listeners: list[Callable[[Round], None]] = [
            self.counters.observe,
            partial(move_thresholds, self.options),
        ]
        if self.budget is not None:
            self.listeners.append(self.budget.observe)
        # The level whose drafts the target verifies, by slot.
        self.top = np.zeros(num_slots, dtype=np.int64)

    def forget(self, slot: int) -> None:
        """The slot's request has ended, or gives its slot up."""
        self.lowest.forget(slot)
        if self.budget is not None:
            self.budget.forget(slot)

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
        began = clock.seconds()
        self.selection = selection or self.everything
        self.lowest.read(batch, slots[requested > 0])
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
        self.top[slots] = self.selection.top
        self._tell(
            level=self.selection.top,
            verifier=len(self.levels),
            slots=slots,
            drafts=top,
            requested=most,
            drafting_seconds=clock.seconds() - began,
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

    def record_branches(self, slots: np.ndarray, winner: np.ndarray, more: np.ndarray) -> None:
        """Take in how far the text followed the branches of a step.

        Args:
            slots: [n] int64.
            winner: [n] int64, the row that holds the text, 0 for the draft itself.
            more: [n] int64 tokens that were emitted after those of the draft's verification.
        """
        assert self.branches is not None
        self.counters.count_branches(self.branches, slots, winner, more)
        if self.budget is not None:
            self.budget.followed(more)

    def _tell(self, **facts: Any) -> None:
        finished = Round(**facts)
        for listener in self.listeners:
            listener(finished)

    def _draft(
        self, batch: DraftBatch, level: int, slots: np.ndarray, requested: np.ndarray
    ) -> DraftStore:
        """The drafts of one level, made anew for `slots`."""
        drafts, takes_part = self.drafts[level], level in self.selection.levels
        drafts.clear(slots)
        if level == 0:
            if takes_part:
                verifier = self.selection.above(0, len(self.levels))
                self.lowest.draft(batch, slots, requested, verifier)
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
        options, drafts, models = self.options[level], self.drafts[level], self.models
        feeder, below_length = self.selection.below(level)
        open_ = requested > 0
        rounds = 0
        while open_.any() and (options.max_rounds is None or rounds < options.max_rounds):
            active = np.flatnonzero(open_)
            now = slots[active]
            room = room_below(requested[active], drafts.counts[now])
            room = np.minimum(room, models.context_lengths[level] - batch.end[now])
            requested_below = np.minimum(below_length, room)
            began = clock.seconds()
            below = self._draft(batch, level - 1, now, requested_below)
            drafted = clock.seconds()
            accepted: np.ndarray | None = None
            if options.verifier == "none":
                computed, ended = append_unverified(models, drafts, batch, level, now, below)
            else:
                counts = below.counts[now]
                forward = models.forward(batch, level, now, counts + 1)
                verdict = verify(models, batch, level, now, below, forward)
                ended = append_verified(drafts, batch, level, now, counts, verdict, forward)
                accepted, computed = verdict[1], forward.computed
            fits = batch.end[now] <= models.context_lengths[level]
            open_[active] = (drafts.counts[now] < requested[active]) & fits & ~ended
            rounds += 1
            self._tell(
                level=feeder,
                verifier=level,
                slots=now,
                drafts=below,
                requested=requested_below,
                accepted=accepted,
                thresholds=batch.thresholds,
                computed=computed,
                drafting_seconds=drafted - began,
                verifying_seconds=clock.seconds() - drafted,
            )
