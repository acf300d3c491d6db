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
from typing import cast

import numpy as np
import torch

from vllm_hsd.core.drafts import DraftStore, ragged_arange, ragged_starts
from vllm_hsd.core.levels import UNLIMITED, Level, LevelOptions, LevelStats, LookupLevel
from vllm_hsd.core.schedule import room_below
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
        drafts: one `DraftStore` per level; the last one is what the target verifies.
        stats: counts per level since the last `take_stats`.
    """

    def __init__(
        self,
        levels: Sequence[Level | LookupLevel],
        options: Sequence[LevelOptions],
        num_slots: int,
        horizontal_tokens: int = 0,
    ) -> None:
        self.lookup = levels[0] if levels and isinstance(levels[0], LookupLevel) else None
        # All levels but a lookup run forward passes.
        self.levels = [cast(Level, level) for level in levels]
        self.context_lengths = [
            UNLIMITED if level is self.lookup else level.context_length for level in self.levels
        ]
        self.options = list(options)
        self.horizontal_tokens = horizontal_tokens
        lengths = [option.draft_length for option in self.options]
        if lengths:
            lengths[0] = max(lengths[0], horizontal_tokens)
        self.drafts = [DraftStore(num_slots, length) for length in lengths]
        self.stats = [LevelStats() for _ in self.levels]
        self.warned: set[int] = set()

    def propose(self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray) -> DraftStore:
        """Draft at most requested[i] tokens for the request in slots[i].

        Returns:
            the top level's drafts: less than requested where a draft ended with eos, the rounds ran
            out, or the text outgrew a level.
        """
        own = np.where(requested > 0, np.maximum(requested - self.horizontal_tokens, 1), 0)
        top = self._draft(batch, len(self.levels) - 1, slots, own)
        if self.horizontal_tokens:
            last = top.token_ids[slots, np.maximum(top.counts[slots] - 1, 0)]
            ended = (top.counts[slots] == 0) | (last == batch.eos[slots])
            room = np.minimum(requested - top.counts[slots], self.horizontal_tokens)
            top.extend(self._draft(batch, 0, slots, np.where(ended, 0, room)), slots)
        self._count_drafted(top, slots)
        return top

    def record_acceptance(
        self, slots: np.ndarray, accepted: np.ndarray, thresholds: EntropyThresholds
    ) -> None:
        """Take in how many tokens of its drafts the target accepted: [n] slots, [n] int64."""
        self._count_accepted(len(self.levels) - 1, self.drafts[-1], slots, accepted, thresholds)

    def take_stats(self) -> list[LevelStats]:
        """The counts since the last call, one entry per level; they start again at zero."""
        taken, self.stats = self.stats, [LevelStats() for _ in self.levels]
        return taken

    def ingest(self, batch: DraftBatch, slots: np.ndarray, end: np.ndarray) -> None:
        """Bring every level's cache of `slots` up to the positions `end`, without drafting."""
        for k, level in enumerate(self.levels):
            if level is self.lookup or not level.keeps_cache:
                continue
            cached = batch.cached[k]
            upto = np.minimum(end, self.context_lengths[k])
            uncached = cached[slots] < upto
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
        fits = batch.end[slots] <= self.context_lengths[level]
        if level > 0 and not fits.all():
            # A level sits out where the text outgrew it: the one below drafts in its place.
            out = slots[~fits]
            most = np.minimum(requested[~fits], self.options[level - 1].draft_length)
            drafts.extend(self._draft(batch, level - 1, out, most), out)
        if not fits.all():
            slots, requested = slots[fits], requested[fits]
        if level > 0:
            self._draft_verified(batch, level, slots, requested)
        elif self.lookup is not None:
            self._draft_looked_up(batch, self.lookup, slots, requested)
        else:
            self._draft_lowest(batch, slots, requested)
        return drafts

    def _draft_looked_up(
        self, batch: DraftBatch, level: LookupLevel, slots: np.ndarray, requested: np.ndarray
    ) -> None:
        rows, ends = batch.rows[slots], batch.end[slots]
        token_ids, counts = level.lookup(batch.tokens, rows, ends, requested)
        owners, offsets = ragged_arange(counts)
        batch.tokens[rows[owners], ends[owners] + offsets] = token_ids[owners, offsets]
        batch.end[slots] += counts
        unknown = np.full(len(owners), np.nan)
        self.drafts[0].append(slots, token_ids, counts, None, ragged_starts(counts), 0, unknown)

    def _draft_lowest(self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray) -> None:
        drafts = self.drafts[0]
        open_ = requested > 0
        if not batch.greedy:
            # All uniforms are drawn at once; leftovers after an early stop are discarded.
            uniforms, first = batch.uniforms(slots, requested, 0), ragged_starts(requested)
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
        below_length = self.options[level - 1].draft_length
        open_ = requested > 0
        rounds = 0
        while open_.any() and (options.max_rounds is None or rounds < options.max_rounds):
            active = np.flatnonzero(open_)
            now = slots[active]
            start = batch.end[now]
            room = room_below(requested[active], drafts.counts[now])
            room = np.minimum(room, self.context_lengths[level] - start)
            below = self._draft(batch, level - 1, now, np.minimum(below_length, room))
            counts = below.counts[now]
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
            rounds += 1
            # Ignore the entropy of rejected positions.
            stopped = np.zeros(len(now), dtype=bool)
            stopped[owners[uncertain & (offsets < emitted[owners])]] = True
            fits = batch.end[now] <= self.context_lengths[level]
            unfilled = drafts.counts[now] < requested[active]
            open_[active] = unfilled & fits & ~ended & ~stopped

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
            stats.accepted += int((kept & (drafts.level[slots] == k)).sum())
        if self.options[level].stopping == "entropy":
            rejected = accepted < drafts.counts[slots]
            place = (slots[rejected], accepted[rejected])
            own = drafts.level[place] == level
            entropy = drafts.entropy[place][own]
            thresholds.observe_rejection(level, slots[rejected][own], entropy)

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
        logits = self.levels[level].forward(batch.tokens, rows, starts, counts, num_logits)
        stats = self.stats[level]
        stats.forwards += 1
        stats.forward_seconds += time.perf_counter() - began
        return logits
