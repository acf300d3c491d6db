"""The recursion over the levels of a cascade, independent of the runner that hosts it.

Level 0 drafts token by token; every level above verifies the draft of the one below and keeps the
token that its own verification draws ("Fast Inference via Hierarchical Speculative Decoding",
Algorithm 1), so each token carries the probabilities of the level that emitted it. All requests of
a batch run together and progress raggedly. What is kept per request is an array indexed by slot.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from vllm_hsd.core.controller import DepthController, Selection
from vllm_hsd.core.counters import Counters
from vllm_hsd.core.drafts import DraftStore, ragged_arange, ragged_starts
from vllm_hsd.core.level_models import LevelModels
from vllm_hsd.core.levels import (
    DraftBatch,
    FirstOf,
    Level,
    LevelOptions,
    LookupLevel,
    PerRequest,
)
from vllm_hsd.core.lowest_level import LowestLevel, split_sources
from vllm_hsd.core.prices import PriceEstimates, Prices
from vllm_hsd.core.schedule import room_below
from vllm_hsd.core.step_times import StepTimes
from vllm_hsd.core.stopping import EntropyThresholds
from vllm_hsd.verify.chain import verify_batch, verify_greedy


class Cascade:
    """Levels 0..K-1, cheapest first, drafting for a target.

    Args:
        levels: the drafters.
        options: one `LevelOptions` per level.
        num_slots: requests that can have a draft at the same time.
        horizontal_tokens: tokens of level 0 that follow the top level's draft unverified, with
            level 0's probabilities (the horizontal cascade of Chen et al., "Cascade Speculative
            Drafting for Even Faster LLM Inference").
        controller: learns from every draft; its selections go to `propose`.

    Attributes:
        levels: the model that runs at each level; None at a lowest level of lookups alone.
        models: what those models compute; fills their caches.
        drafts: one `DraftStore` per level; the last one is what the target verifies.
        counters: drafted and accepted tokens per level.
        target_times: seconds of the target's step by tokens; reported by what runs the target.
        level_times: per level, see `DepthController.level_times`.
        prices: what drafts of several sources cost; None without them.
    """

    def __init__(
        self,
        levels: Sequence[Level | LookupLevel | FirstOf],
        options: Sequence[LevelOptions],
        num_slots: int,
        horizontal_tokens: int = 0,
        controller: DepthController | None = None,
    ) -> None:
        self.levels: list[Level | None] = []
        if levels:
            _, model = split_sources(levels[0])
            self.levels = [model, *cast(Sequence[Level], levels[1:])]
        self.options = list(options)
        self.horizontal_tokens = horizontal_tokens
        lengths = [option.draft_length for option in self.options]
        if lengths:
            lengths[0] = max(lengths[0], horizontal_tokens)
        self.drafts = [DraftStore(num_slots, length) for length in lengths]
        names = levels[0].names if levels and isinstance(levels[0], FirstOf) else []
        self.counters = Counters(len(self.levels), names)
        self.models = LevelModels(self.levels, self.options, self.counters)
        self.lowest = LowestLevel(levels[0], self.models, self.drafts[0]) if options else None
        self.target_times, self.level_times = StepTimes(), [StepTimes() for _ in self.levels]
        if controller is not None:
            self.target_times, self.level_times = controller.target_times, controller.level_times
        self.prices: PriceEstimates | None = None
        if self.lowest is not None and self.lowest.choice is not None:
            verifiers = [*self.level_times, self.target_times]
            self.prices = PriceEstimates(lengths[0], verifiers, self.lowest.model_times)
        # Requests that could draft for the step under way, and the seconds that drafting took.
        self.requested, self.drafting_seconds = np.zeros(num_slots, dtype=bool), 0.0
        self.controller = controller
        self.everything = Selection(
            tuple(range(len(self.levels))), tuple(option.draft_length for option in self.options)
        )
        self.selection = self.everything
        # The level whose drafts the target verifies, by slot.
        self.top = np.zeros(num_slots, dtype=np.int64)

    @property
    def per_request(self) -> list[PerRequest]:
        """Whatever must be told when a request leaves its slot."""
        kept: list[Any] = list(self.levels)
        if self.lowest is not None:
            kept += [*self.lowest.lookups, self.lowest.choice]
        if self.controller is not None:
            kept.append(self.controller.acceptance)
        return [item for item in kept if hasattr(item, "set_aside")]

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
        drafting = slots[requested > 0]
        assert self.lowest is not None
        self.lowest.read(batch, drafting)
        own = np.where(requested > 0, np.maximum(requested - self.horizontal_tokens, 1), 0)
        top = self._draft(batch, len(self.levels) - 1, slots, own)
        if self.horizontal_tokens:
            last = top.token_ids[slots, np.maximum(top.counts[slots] - 1, 0)]
            ended = (top.counts[slots] == 0) | (last == batch.eos[slots])
            room = np.minimum(requested - top.counts[slots], self.horizontal_tokens)
            top.extend(self._draft(batch, 0, slots, np.where(ended, 0, room)), slots)
        self.counters.add_drafted(top, slots)
        empty = int((top.counts[drafting] == 0).sum())
        self.counters.add_requested(len(self.levels) - 1, len(drafting), empty)
        if self.controller is not None and self.selection.levels:
            self.top[slots] = self.selection.levels[-1]
            pair = self.controller.pair(self.selection.levels[-1], len(self.levels))
            self.controller.acceptance.count(pair, len(drafting), len(drafting) - empty)
        self.requested[slots], self.drafting_seconds = (
            requested > 0,
            time.perf_counter() - began,
        )
        if not top.counts[slots].any():
            # Without drafts there is nothing to verify: the round ends here.
            self._close_round(drafting, np.zeros(len(drafting), dtype=np.int64))
        return top

    def current_prices(self, size: int) -> list[Prices] | None:
        """For `DraftBatch.prices` with `size` requests; None where no source chooses.

        Level 0 verifies nothing: its entry is not to be read.

        They depend on times, so the ranks of a tensor-parallel target must agree on one's.
        """
        if self.prices is None or self.lowest is None:
            return None
        cost, verifiers = self.lowest.model_cost, range(1, len(self.levels) + 1)
        paid = [self.prices.prices(verifier, size, cost) for verifier in verifiers]
        return [paid[0], *paid]

    def _close_round(self, slots: np.ndarray, accepted: np.ndarray) -> None:
        """Take in what became of the last drafts of `slots`, and what they cost."""
        own = self.requested[slots]
        self.requested[slots] = False
        if self.prices is None:
            return
        drafted = int(self.drafts[-1].counts[slots[own]].sum())
        emitted = int((accepted[own] + 1).sum())
        self.prices.observe(
            len(self.levels), int(own.sum()), drafted, emitted, self.drafting_seconds
        )

    def record_acceptance(
        self, slots: np.ndarray, accepted: np.ndarray, thresholds: EntropyThresholds
    ) -> None:
        """Take in how many tokens of its drafts the target accepted: [n] slots, [n] int64."""
        top = self.drafts[-1]
        self.counters.add_accepted(top, slots, accepted)
        self._move_thresholds(len(self.levels) - 1, slots, accepted, thresholds)
        self._close_round(slots, accepted)
        if self.controller is not None:
            for level in np.unique(self.top[slots]).tolist():
                own = slots[self.top[slots] == level]
                pair = self.controller.pair(level, len(self.levels))
                kept = accepted[self.top[slots] == level]
                self.controller.acceptance.observe(pair, own, top.counts[own], kept)

    def _draft(
        self, batch: DraftBatch, level: int, slots: np.ndarray, requested: np.ndarray
    ) -> DraftStore:
        """The drafts of one level, made anew for `slots`."""
        drafts = self.drafts[level]
        drafts.clear(slots)
        if level not in self.selection.levels:
            if level > 0:
                most = np.minimum(requested, self.options[level - 1].draft_length)
                drafts.extend(self._draft(batch, level - 1, slots, most), slots)
            return drafts
        if level == 0:
            self._draft_timed(batch, slots, requested)
            return drafts
        fits = self.models.can_draft(batch, level, slots)
        if not fits.all():
            # A level sits out where the text outgrew it: the one below drafts in its place.
            out = slots[~fits]
            most = np.minimum(requested[~fits], self.options[level - 1].draft_length)
            drafts.extend(self._draft(batch, level - 1, out, most), out)
            slots, requested = slots[fits], requested[fits]
        self._draft_verified(batch, level, slots, requested)
        return drafts

    def _draft_timed(self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray) -> None:
        """Draft at the lowest level; its time per draft, or per token of a model, is learned."""
        began = time.perf_counter()
        uncached = batch.end[slots] - batch.cached[0, slots]
        assert self.lowest is not None
        verifier = next((k for k in self.selection.levels if k > 0), len(self.levels))
        self.lowest.draft(batch, slots, requested, verifier)
        size, longest = int((requested > 0).sum()), int(requested.max(initial=0))
        if not size:
            return
        seconds = time.perf_counter() - began
        self.counters.stats[0].seconds += seconds
        if self.levels[0] is None or self.lowest.choice is not None:
            self.level_times[0].observe(size, seconds)
        elif not (uncached > self.drafts[-1].length + 1).any():
            self.level_times[0].observe(size, seconds / longest)

    def _draft_verified(
        self, batch: DraftBatch, level: int, slots: np.ndarray, requested: np.ndarray
    ) -> None:
        options, drafts, models = self.options[level], self.drafts[level], self.models
        below_length = self._length_below(level)
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
            began, computed = time.perf_counter(), int((start - batch.cached[level, now]).sum())
            logits = models.forward(batch, level, now, counts + 1)
            owners, offsets = ragged_arange(counts + 1)
            entropy, uncertain = models.confidence(batch, level, logits, now[owners])
            token_ids, accepted, probs = self._verify(batch, level, now, below, logits)
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
            drafts.append(now, token_ids, emitted, probs, ragged_starts(counts + 1), level, entropy)
            self.counters.add_drafted(below, now)
            self.counters.add_accepted(below, now, accepted)
            self._move_thresholds(level - 1, now, accepted, batch.thresholds)
            seconds, drafted = time.perf_counter() - began, int(counts.sum())
            self.level_times[level].observe(computed + drafted, seconds)
            self.counters.stats[level].seconds += seconds
            filled = int((counts > 0).sum())
            self.counters.add_requested(
                level - 1,
                int((requested_below > 0).sum()),
                int((requested_below > 0).sum()) - filled,
            )
            if self.prices is not None:
                produced = int((accepted + 1).sum())
                spent = began - drafting_began
                self.prices.observe(level, len(now), drafted, produced, spent)
            self._learn_acceptance(level, now, requested_below, counts, accepted)
            rounds += 1
            # Ignore the entropy of rejected positions.
            stopped = np.zeros(len(now), dtype=bool)
            stopped[owners[uncertain & (offsets < emitted[owners])]] = True
            fits = batch.end[now] <= models.context_lengths[level]
            unfilled = drafts.counts[now] < requested[active]
            open_[active] = unfilled & fits & ~ended & ~stopped

    def _length_below(self, level: int) -> int:
        """Draft length of the selected level below `level`, 0 without one: it then drafts alone."""
        place = self.selection.levels.index(level)
        return self.selection.draft_lengths[place - 1] if place else 0

    def _learn_acceptance(
        self,
        level: int,
        slots: np.ndarray,
        requested_below: np.ndarray,
        counts: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """Tell the controller what `level` accepted of the drafts of the one below it."""
        place = self.selection.levels.index(level)
        if place and self.controller is not None:
            pair = self.controller.pair(self.selection.levels[place - 1], level)
            self.controller.acceptance.count(
                pair, int((requested_below > 0).sum()), int((counts > 0).sum())
            )
            self.controller.acceptance.observe(pair, slots, counts, accepted)

    def _verify(
        self,
        batch: DraftBatch,
        level: int,
        slots: np.ndarray,
        below: DraftStore,
        logits: torch.Tensor,
    ) -> tuple[np.ndarray, np.ndarray, torch.Tensor | None]:
        """Verify the drafts from below.

        Returns:
            (token ids [batch, width + 1], accepted [batch], the level's probabilities for `logits`,
            None where all requests are greedy).
        """
        counts = below.counts[slots]
        probs = None
        if not batch.greedy:
            probs = self.models.probs(batch, level, logits, np.repeat(slots, counts + 1))
        rows = logits if probs is None else probs
        chain = below.chain_batch(slots, counts, rows, counts, counts)
        if probs is None:
            token_ids, accepted = verify_greedy(chain, self.models.argmax(logits, level))
        else:
            uniforms = batch.uniforms(slots, counts + 1, level)
            token_ids, accepted = verify_batch(chain, self.options[level].verifier, uniforms)
        return token_ids, accepted, probs

    def _move_thresholds(
        self, level: int, slots: np.ndarray, accepted: np.ndarray, thresholds: EntropyThresholds
    ) -> None:
        """Take in the entropy of `level` at the first rejected tokens of its drafts."""
        if self.options[level].stopping == "entropy":
            drafts = self.drafts[level]
            rejected = accepted < drafts.counts[slots]
            place = (slots[rejected], accepted[rejected])
            own = drafts.level[place] == level
            entropy = drafts.entropy[place][own]
            thresholds.observe_rejection(level, slots[rejected][own], entropy)
