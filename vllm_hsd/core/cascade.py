"""The recursion over the levels of a cascade, independent of the runner that hosts it.

Level 0 drafts token by token; every level above verifies the draft of the one below and keeps the
token that its own verification draws ("Fast Inference via Hierarchical Speculative Decoding",
Algorithm 1), so each token carries the probabilities of the level that emitted it. All requests of
a batch run together and progress raggedly. What is kept per request is an array indexed by slot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from vllm_hsd.core.controller import DepthController, Selection
from vllm_hsd.core.drafts import DraftStore, ragged_arange, ragged_starts
from vllm_hsd.core.levels import (
    UNLIMITED,
    FirstOf,
    Level,
    LevelOptions,
    LevelStats,
    Lookup,
    LookupLevel,
    PerRequest,
    SourceStats,
)
from vllm_hsd.core.schedule import room_below
from vllm_hsd.core.sources import DRAFTER_ACCEPTANCE, SourceChoice
from vllm_hsd.core.stopping import EntropyThresholds, entropy_nats
from vllm_hsd.verify.chain import argmax_rows, verify_batch, verify_greedy
from vllm_hsd.verify.residual import ROW_SUM_TOLERANCE, BlockedCDF

logger = logging.getLogger(__name__)


@dataclass
class DraftBatch:
    """The requests that a cascade drafts for in one step; every array is indexed by slot.

    Attributes:
        tokens: [table rows, max length] int32; drafts are written after the committed tokens.
        rows: [slots] int64, row of each slot's request in `tokens`.
        end: [slots] int64, tokens in the text, first the committed ones; grows while drafting.
        cached: [levels, slots] int64, positions whose KV entries are valid; updated in place.
        eos: [slots] int64, token that ends the request, -1 for none; drafts end with it.
        greedy: every request takes the argmax: no probabilities are built.
        probs: (logits [n, V], slots [n], level) -> [n, V] probabilities that the level samples
            from and is verified by.
        uniforms: (slots [b], counts [b], level) -> [sum(counts)] float64, each used once.
        thresholds: entropy thresholds per level and slot; updated in place.
        sits_out: [levels, slots] bool, requests that a level can draft nothing for; None for none.
    """

    tokens: np.ndarray
    rows: np.ndarray
    end: np.ndarray
    cached: np.ndarray
    eos: np.ndarray
    greedy: bool
    probs: Callable[[torch.Tensor, np.ndarray, int], torch.Tensor]
    uniforms: Callable[[np.ndarray, np.ndarray, int], np.ndarray]
    thresholds: EntropyThresholds
    sits_out: np.ndarray | None = None


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
        lookups: sources of the lowest level without forward passes.
        drafts: one `DraftStore` per level; the last one is what the target verifies.
        stats: counts per level since the last `take_stats`.
    """

    def __init__(
        self,
        levels: Sequence[Level | LookupLevel | FirstOf],
        options: Sequence[LevelOptions],
        num_slots: int,
        horizontal_tokens: int = 0,
        controller: DepthController | None = None,
    ) -> None:
        self.levels: list[Level | None] = [cast(Level, level) for level in levels]
        self.lookups: list[LookupLevel] = []
        self.first_of = levels[0] if levels and isinstance(levels[0], FirstOf) else None
        if self.first_of is not None:
            self.lookups, self.levels[0] = self.first_of.lookups, self.first_of.drafter
        elif levels and isinstance(levels[0], LookupLevel):
            self.lookups, self.levels[0] = [levels[0]], None
        self.context_lengths = [
            UNLIMITED if level is None else level.context_length for level in self.levels
        ]
        self.options = list(options)
        self.horizontal_tokens = horizontal_tokens
        lengths = [option.draft_length for option in self.options]
        if lengths:
            lengths[0] = max(lengths[0], horizontal_tokens)
        self.drafts = [DraftStore(num_slots, length) for length in lengths]
        self.choice: SourceChoice | None = None
        if self.first_of is not None:
            self.choice = SourceChoice(self.first_of, num_slots, lengths[0])
        self.stats = [LevelStats() for _ in self.levels]
        self.warned: set[int] = set()
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
        kept: list[Any] = [*self.lookups, *self.levels]
        if self.choice is not None:
            kept.append(self.choice)
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
                options; None for all. It may depend on committed text, past verdicts and times.

        Returns:
            the top level's drafts: less than requested where a draft ended with eos, the rounds ran
            out, or the text outgrew a level.
        """
        self.selection = self.everything if selection is None else selection
        drafting = slots[requested > 0]
        for lookup in self.lookups:
            lookup.read(batch.tokens, batch.rows[drafting], drafting, batch.end[drafting])
        own = np.where(requested > 0, np.maximum(requested - self.horizontal_tokens, 1), 0)
        top = self._draft(batch, len(self.levels) - 1, slots, own)
        if self.horizontal_tokens:
            last = top.token_ids[slots, np.maximum(top.counts[slots] - 1, 0)]
            ended = (top.counts[slots] == 0) | (last == batch.eos[slots])
            room = np.minimum(requested - top.counts[slots], self.horizontal_tokens)
            top.extend(self._draft(batch, 0, slots, np.where(ended, 0, room)), slots)
        self._count_drafted(top, slots)
        if self.controller is not None and self.selection.levels:
            self.top[slots] = self.selection.levels[-1]
            pair = self.controller.pair(self.selection.levels[-1], len(self.levels))
            filled = int((top.counts[drafting] > 0).sum())
            self.controller.acceptance.count(pair, len(drafting), filled)
        return top

    def record_acceptance(
        self, slots: np.ndarray, accepted: np.ndarray, thresholds: EntropyThresholds
    ) -> None:
        """Take in how many tokens of its drafts the target accepted: [n] slots, [n] int64."""
        top = self.drafts[-1]
        self._count_accepted(len(self.levels) - 1, top, slots, accepted, thresholds)
        if self.controller is not None:
            for level in np.unique(self.top[slots]).tolist():
                own = slots[self.top[slots] == level]
                pair = self.controller.pair(level, len(self.levels))
                kept = accepted[self.top[slots] == level]
                self.controller.acceptance.observe(pair, own, top.counts[own], kept)

    def take_stats(self) -> list[LevelStats]:
        """The counts since the last call, one entry per level; they start again at zero."""
        taken, self.stats = self.stats, [LevelStats() for _ in self.levels]
        return taken

    def ingest(self, batch: DraftBatch, slots: np.ndarray, end: np.ndarray) -> None:
        """Bring every level's cache of `slots` up to the positions `end`, without drafting.

        Args:
            batch: the step's requests.
            slots: [n] int64.
            end: [n] int64, or [levels, n].
        """
        end = np.broadcast_to(end, (len(self.levels), len(slots)))
        for k, level in enumerate(self.levels):
            if level is None or not level.keeps_cache:
                continue
            cached = batch.cached[k]
            upto = np.minimum(end[k], self.context_lengths[k])
            uncached = (cached[slots] < upto) & self._takes_part(batch, k, slots)
            if uncached.any():
                filled, upto = slots[uncached], upto[uncached]
                none = np.zeros(len(filled), dtype=np.int64)
                self._timed_forward(batch, k, filled, upto - cached[filled], none)
                cached[filled] = upto

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
        fits = batch.end[slots] <= self.context_lengths[level]
        fits &= self._takes_part(batch, level, slots)
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
        if self.choice is not None:
            self._draft_from_sources(batch, self.choice, slots, requested)
        elif self.lookups:
            rows, ends = batch.rows[slots], batch.end[slots]
            found = self.lookups[0].lookup(batch.tokens, rows, slots, ends, requested)
            self._append_found(batch, slots, found.token_ids, found.counts)
        else:
            fits = batch.end[slots] <= self.context_lengths[0]
            fits &= self._takes_part(batch, 0, slots)
            self._draft_lowest(batch, slots[fits], requested[fits])
        size, longest = int((requested > 0).sum()), int(requested.max(initial=0))
        if self.controller is None or not size:
            return
        if self.levels[0] is None:
            self.controller.level_times[0].observe(size, time.perf_counter() - began)
        elif not (uncached > self.drafts[-1].length + 1).any():
            seconds = (time.perf_counter() - began) / longest
            self.controller.level_times[0].observe(size, seconds)

    def _takes_part(self, batch: DraftBatch, level: int, slots: np.ndarray) -> np.ndarray:
        """[n] bool, the requests for which the level has what it needs."""
        if batch.sits_out is None:
            return np.ones(len(slots), dtype=bool)
        return ~batch.sits_out[level, slots]

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
        self.drafts[0].append(slots, token_ids, counts, None, first, 0, unknown, source)

    def _draft_from_sources(
        self, batch: DraftBatch, choice: SourceChoice, slots: np.ndarray, requested: np.ndarray
    ) -> None:
        """Drafts of lookups, each continued by the next one, and at last by the drafter."""
        drafts = self.drafts[0]
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
        if self.levels[0] is not None:
            self._continue_with_drafter(
                batch, choice, slots, np.where(ended, drafts.counts[slots], requested)
            )

    def _continue_with_drafter(
        self, batch: DraftBatch, choice: SourceChoice, slots: np.ndarray, requested: np.ndarray
    ) -> None:
        """Fill the drafts of `slots` up to requested[i] tokens where the drafter is worth it."""
        drafts = self.drafts[0]
        begin = drafts.counts[slots].copy()
        fits = batch.end[slots] <= self.context_lengths[0]
        fits &= self._takes_part(batch, 0, slots)
        used = choice.drafts(slots, requested - begin) & (requested > begin)
        choice.note_use(slots[requested > 0], used[requested > 0])
        used &= fits
        slots, requested, begin = slots[used], requested[used], begin[used]
        self._draft_lowest(batch, slots, requested)
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

    def _draft_lowest(self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray) -> None:
        """Draft until the drafts, which may have begun with looked-up tokens, are requested[i]."""
        drafts = self.drafts[0]
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
            logits = self._forward(batch, 0, now, one)
            entropy, uncertain = self._confidence(batch, 0, logits, now)
            if batch.greedy:
                probs, token_ids = None, self._argmax(logits, 0)
            else:
                probs = self._probs(batch, logits, now, 0)
                drawn = torch.from_numpy(uniforms[first[active] + drafts.counts[now]])
                token_ids = BlockedCDF(probs).draw(drawn.to(probs.device)).cpu().numpy()
            batch.tokens[batch.rows[now], batch.end[now]] = token_ids
            batch.end[now] += 1
            drafts.append(now, token_ids[:, None], one, probs, np.arange(len(now)), 0, entropy)
            ended = (token_ids == batch.eos[now]) | uncertain
            fits = batch.end[now] <= self.context_lengths[0]
            open_[active] = (drafts.counts[now] < requested[active]) & fits & ~ended

    def _draft_verified(
        self, batch: DraftBatch, level: int, slots: np.ndarray, requested: np.ndarray
    ) -> None:
        options, drafts = self.options[level], self.drafts[level]
        below_length = self._length_below(level)
        open_ = requested > 0
        rounds = 0
        while open_.any() and (options.max_rounds is None or rounds < options.max_rounds):
            active = np.flatnonzero(open_)
            now = slots[active]
            start = batch.end[now]
            room = room_below(requested[active], drafts.counts[now])
            room = np.minimum(room, self.context_lengths[level] - start)
            asked = np.minimum(below_length, room)
            below = self._draft(batch, level - 1, now, asked)
            counts = below.counts[now]
            began, computed = time.perf_counter(), int((start - batch.cached[level, now]).sum())
            logits = self._forward(batch, level, now, counts + 1)
            owners, offsets = ragged_arange(counts + 1)
            entropy, uncertain = self._confidence(batch, level, logits, now[owners])
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
            self._count_drafted(below, now)
            self._count_accepted(level - 1, below, now, accepted, batch.thresholds)
            if self.controller is not None:
                seconds = time.perf_counter() - began
                self.controller.level_times[level].observe(computed + int(counts.sum()), seconds)
                self._learn_acceptance(level, now, asked, counts, accepted)
            rounds += 1
            # Ignore the entropy of rejected positions.
            stopped = np.zeros(len(now), dtype=bool)
            stopped[owners[uncertain & (offsets < emitted[owners])]] = True
            fits = batch.end[now] <= self.context_lengths[level]
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
        asked: np.ndarray,
        counts: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """Tell the controller what `level` accepted of the drafts of the one below it."""
        place = self.selection.levels.index(level)
        if place and self.controller is not None:
            pair = self.controller.pair(self.selection.levels[place - 1], level)
            self.controller.acceptance.count(pair, int((asked > 0).sum()), int((counts > 0).sum()))
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
            probs = self._probs(batch, logits, np.repeat(slots, counts + 1), level)
        rows = logits if probs is None else probs
        chain = below.chain_batch(slots, counts, rows, counts, counts)
        if probs is None:
            token_ids, accepted = verify_greedy(chain, self._argmax(logits, level))
        else:
            uniforms = batch.uniforms(slots, counts + 1, level)
            token_ids, accepted = verify_batch(chain, self.options[level].verifier, uniforms)
        return token_ids, accepted, probs

    def _probs(
        self, batch: DraftBatch, logits: torch.Tensor, slots: np.ndarray, level: int
    ) -> torch.Tensor:
        """The level's probabilities; uniform where its logits are not finite."""
        probs = batch.probs(logits, slots, level)
        usable = (probs.sum(-1) - 1).abs() < ROW_SUM_TOLERANCE
        if not usable.all():
            self._warn_unless(level, False)
            probs[~usable] = 1 / probs.shape[1]
        return probs

    def _argmax(self, logits: torch.Tensor, level: int) -> np.ndarray:
        """[n] int64 greedy tokens."""
        best, peak = argmax_rows(logits)
        self._warn_unless(level, bool(np.isfinite(peak).all()))
        return best

    def _warn_unless(self, level: int, finite: bool) -> None:
        """One warning per level: any token that it drafts then is still verified losslessly."""
        if not finite and level not in self.warned:
            self.warned.add(level)
            logger.warning(
                "levels[%d] gives logits that are not finite; its drafts are arbitrary there, "
                "which costs acceptance: check its weights and dtype.",
                level,
            )

    def _confidence(
        self, batch: DraftBatch, level: int, logits: torch.Tensor, slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Entropies of rows [n] and whether each lies above its request's threshold."""
        if self.options[level].stopping != "entropy":
            return np.full(len(slots), np.nan), np.zeros(len(slots), dtype=bool)
        entropy = entropy_nats(logits)
        return entropy, batch.thresholds.exceeded(level, slots, entropy)

    def _count_drafted(self, drafts: DraftStore, slots: np.ndarray) -> None:
        """Count the tokens of these drafts for the levels that made them."""
        filled = np.arange(drafts.length) < drafts.counts[slots][:, None]
        for k, stats in enumerate(self.stats):
            made = filled & (drafts.level[slots] == k)
            stats.drafted += int(made.sum())
            stats.rounds += int(made.any(1).sum())
            if k == 0:
                self._count_sources(drafts, slots, made, "drafted")

    def _count_accepted(
        self,
        level: int,
        drafts: DraftStore,
        slots: np.ndarray,
        accepted: np.ndarray,
        thresholds: EntropyThresholds,
    ) -> None:
        """Count accepted tokens for the levels that made them; move the thresholds of `level`."""
        kept = np.arange(drafts.length) < accepted[:, None]
        for k, stats in enumerate(self.stats):
            made = kept & (drafts.level[slots] == k)
            stats.accepted += int(made.sum())
            if k == 0:
                self._count_sources(drafts, slots, made, "accepted")
        if self.options[level].stopping == "entropy":
            rejected = accepted < drafts.counts[slots]
            place = (slots[rejected], accepted[rejected])
            own = drafts.level[place] == level
            entropy = drafts.entropy[place][own]
            thresholds.observe_rejection(level, slots[rejected][own], entropy)

    def _count_sources(
        self, drafts: DraftStore, slots: np.ndarray, made: np.ndarray, name: str
    ) -> None:
        """Add the lowest level's tokens ([n, length] bool) to a count of their sources."""
        if self.first_of is None:
            return
        for source, label in enumerate(self.first_of.names):
            counts = self.stats[0].sources.setdefault(label, SourceStats())
            count = int((made & (drafts.source[slots] == source)).sum())
            setattr(counts, name, getattr(counts, name) + count)

    def _forward(
        self, batch: DraftBatch, level: int, slots: np.ndarray, num_logits: np.ndarray
    ) -> torch.Tensor:
        """Logits of the last positions of `slots`; the level's cache is then valid to the end."""
        counts = batch.end[slots] - batch.cached[level, slots]
        logits = self._timed_forward(batch, level, slots, counts, num_logits)
        assert logits is not None
        batch.cached[level, slots] = batch.end[slots]
        return logits

    def _timed_forward(
        self,
        batch: DraftBatch,
        level: int,
        slots: np.ndarray,
        counts: np.ndarray,
        num_logits: np.ndarray,
    ) -> torch.Tensor | None:
        began = time.perf_counter()
        starts = batch.cached[level, slots]
        rows = batch.rows[slots]
        model = self.levels[level]
        assert model is not None
        logits = model.forward(batch.tokens, rows, starts, counts, num_logits)
        stats = self.stats[level]
        stats.forwards += 1
        stats.forward_seconds += time.perf_counter() - began
        return logits


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
