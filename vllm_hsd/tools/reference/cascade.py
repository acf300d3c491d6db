"""The recursion over the levels of a cascade, independent of the runner that hosts it.

Level 0 drafts token by token; every level above verifies the draft of the one below and keeps the
token that its own verification draws ("Fast Inference via Hierarchical Speculative Decoding",
Algorithm 1), so each token carries the probabilities of the level that emitted it.
`tools.reference.simple` is the same for one request, in plain torch. Here all requests of a batch
run together and progress raggedly; what is kept per request is an array indexed by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_hsd.cascade.counters import Count, LevelCounts
from vllm_hsd.cascade.level import LevelOptions, StepLevels
from vllm_hsd.cascade.ragged import ragged_arange, ragged_starts
from vllm_hsd.rules.residual import draw
from vllm_hsd.tools.lookup_level import UNLIMITED, LookupLevel
from vllm_hsd.tools.reference.batch import DraftBatch, Level
from vllm_hsd.tools.reference.drafts import DraftStore
from vllm_hsd.tools.reference.stopping import EntropyThresholds, entropy_nats


class Forward(NamedTuple):
    """What a level's model says of R positions, request after request.

    Attributes:
        logits: [R, V].
        probs: [R, V] that the level draws from and verifies by; None of greedy requests.
        entropy: [R] float64 nats, NaN where the level does not stop by it.
        uncertain: [R] bool, it exceeds the request's threshold.
    """

    logits: torch.Tensor
    probs: torch.Tensor | None
    entropy: np.ndarray
    uncertain: np.ndarray


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
        context_lengths: longest text of each level in tokens.
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
        self.context_lengths = [
            UNLIMITED if model is None else model.context_length for model in self.levels
        ]

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
                self._draft_lowest(batch, slots, requested)
            return drafts
        drafting = self._can_draft(batch, level, slots) & takes_part
        if not drafting.all():
            # A level is left out, or the text outgrew it: the one below drafts in its place.
            out = slots[~drafting]
            most = np.minimum(requested[~drafting], self.options[level - 1].draft_length)
            drafts.extend(self._draft(batch, level - 1, out, most), out)
        if drafting.any():
            self._draft_verified(batch, level, slots[drafting], requested[drafting])
        return drafts

    def _can_draft(self, batch: DraftBatch, level: int, slots: np.ndarray) -> np.ndarray:
        """[n] bool, the requests whose text fits the level."""
        able: np.ndarray = batch.end[slots] <= self.context_lengths[level]
        return able

    def _draft_lowest(self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray) -> None:
        """Draft from a lookup, whose tokens are point masses, or from a model."""
        if self.lookup is None:
            fits = self._can_draft(batch, 0, slots)
            self._draft_from_model(batch, slots[fits], requested[fits])
            return
        found = self.lookup.lookup(batch.texts(slots), requested)
        owners, offsets = ragged_arange(found.counts)
        now = slots[owners]
        batch.tokens[now, batch.end[now] + offsets] = found.token_ids[owners, offsets]
        batch.end[slots] += found.counts
        first, unknown = ragged_starts(found.counts), np.full(len(owners), np.nan)
        self.drafts[0].append(slots, found.token_ids, found.counts, None, first, 0, unknown)

    def _draft_from_model(
        self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray
    ) -> None:
        """Draft token by token, each drawn from the lowest model's probabilities."""
        drafts, open_, first = self.drafts[0], requested > 0, ragged_starts(requested)
        # Those that are left over are discarded.
        uniforms = None if batch.greedy else batch.uniforms(slots, requested, 0)
        while open_.any():
            active = np.flatnonzero(open_)
            now = slots[active]
            drawn = None if uniforms is None else uniforms[first[active] + drafts.counts[now]]
            ended = self._append_own(batch, 0, now, drawn)
            open_[active] = (drafts.counts[now] < requested[active]) & ~ended

    def _draft_verified(
        self, batch: DraftBatch, level: int, slots: np.ndarray, requested: np.ndarray
    ) -> None:
        """Rounds of a draft from below and its verification, until requested[i] tokens are kept.

        A level whose verifier is "none" keeps all of the draft and adds a token.
        """
        drafts, most = self.drafts[level], self.options[level].max_rounds
        context_length = self.context_lengths[level]
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
        self.counts.add_requests(self.selection.below(level)[0], requested, below.counts[slots])
        if self.options[level].verifier == "none":
            return self._append_unverified(batch, level, slots, below)
        accepted, ended = self._keep_accepted(batch, level, slots, below)
        # Those that a level passes on unverified count where they are verified.
        self._count(Count.drafted, below, slots, below.counts[slots])
        self._count(Count.accepted, below, slots, accepted)
        self._move_thresholds(below, slots, accepted, batch.thresholds)
        return ended

    def _append_own(
        self, batch: DraftBatch, level: int, slots: np.ndarray, uniforms: np.ndarray | None
    ) -> np.ndarray:
        """Add a token of the level's model to each draft.

        Args:
            uniforms: [n] float64, None of greedy requests.

        Returns:
            [n] bool, drafts that end here: with eos, after a token that the level is unsure of, or
            where the text outgrows the level.
        """
        one = np.ones(len(slots), dtype=np.int64)
        forward = self._forward(batch, level, slots, one)
        if forward.probs is None or uniforms is None:
            token_ids = forward.logits.argmax(-1).cpu().numpy()
        else:
            pairs = zip(forward.probs, uniforms, strict=True)
            token_ids = np.array([draw(row, u) for row, u in pairs])
        batch.tokens[slots, batch.end[slots]] = token_ids
        batch.end[slots] += 1
        order, drafts = np.arange(len(slots)), self.drafts[level]
        drafts.append(slots, token_ids[:, None], one, forward.probs, order, level, forward.entropy)
        outgrown = batch.end[slots] > self.context_lengths[level]
        ended: np.ndarray = (token_ids == batch.eos[slots]) | forward.uncertain | outgrown
        return ended

    def _append_unverified(
        self, batch: DraftBatch, level: int, slots: np.ndarray, below: DraftStore
    ) -> np.ndarray:
        """Keep drafts that end the texts as they are, and add a token of the level to each.

        Every token keeps the probabilities that it was drawn from, so the next verification is
        lossless (Chen, "An Exploration of Hierarchical Speculative Decoding", Algorithm 2). Nothing
        follows eos. Returns as `_append_own`.
        """
        last = batch.tokens[slots, batch.end[slots] - 1]
        ended: np.ndarray = (below.counts[slots] > 0) & (last == batch.eos[slots])
        self.drafts[level].extend(below, slots)
        going = np.flatnonzero(~ended)
        if not len(going):
            return ended
        now, one = slots[going], np.ones(len(going), np.int64)
        uniforms = None if batch.greedy else batch.uniforms(now, one, level)
        ended[going] = self._append_own(batch, level, now, uniforms)
        return ended

    def _keep_accepted(
        self, batch: DraftBatch, level: int, slots: np.ndarray, below: DraftStore
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keep what the level accepts of drafts that end the texts, and the token drawn after it.

        Nothing follows an accepted eos, not even the token drawn after it.

        Returns:
            tokens accepted, [n] int64, and drafts that end here, with eos or after a token that the
            level is unsure of, [n] bool.
        """
        counts = below.counts[slots]
        forward = self._forward(batch, level, slots, counts + 1)
        rows, uniforms = forward.logits, None
        if forward.probs is not None:
            rows, uniforms = forward.probs, batch.uniforms(slots, counts + 1, level)
        first, accepted = ragged_starts(counts + 1), np.zeros_like(counts)
        token_ids = np.full((len(slots), int(counts.max()) + 1), -1, dtype=np.int64)
        for i, slot in enumerate(slots.tolist()):
            own = slice(first[i], first[i] + counts[i] + 1)
            drawn = None if uniforms is None else uniforms[own].tolist()
            found, accepted[i] = below.verify(slot, rows[own], drawn, self.options[level].verifier)
            token_ids[i, : len(found)] = found
        start = batch.end[slots] - counts
        is_eos = (token_ids == batch.eos[slots][:, None]) & (token_ids >= 0)
        ended: np.ndarray = is_eos.any(1)
        last = np.where(ended, is_eos.argmax(1), accepted)
        emitted = last + 1
        batch.tokens[slots, start + last] = token_ids[np.arange(len(slots)), last]
        batch.end[slots] = start + emitted
        # What was computed from the last token on belongs to rejected tokens.
        cached = batch.cached[: level + 1, slots]
        batch.cached[: level + 1, slots] = np.minimum(cached, start + last)
        drafts = self.drafts[level]
        drafts.append(slots, token_ids, emitted, forward.probs, first, level, forward.entropy)
        # Ignore the entropy of rejected positions.
        owners, offsets = ragged_arange(counts + 1)
        ended[owners[forward.uncertain & (offsets < emitted[owners])]] = True
        return accepted, ended

    def _forward(
        self, batch: DraftBatch, level: int, slots: np.ndarray, num_logits: np.ndarray
    ) -> Forward:
        """Run the level on all that its cache lacks of `slots`, which is then valid to the end.

        Args:
            slots: [n] int64.
            num_logits: [n] int64, how many of the last positions are wanted.

        Returns:
            sum(num_logits) rows, request after request.
        """
        start, model = batch.cached[level, slots], self.levels[level]
        counts = batch.end[slots] - start
        assert model is not None
        logits = model.forward(batch.tokens, slots, start, counts, num_logits)
        self.counts.rows[level, Count.forwards] += 1
        batch.cached[level, slots] = batch.end[slots]
        owners = np.repeat(slots, num_logits)
        probs = None if batch.greedy else batch.probs(logits, owners, level)
        entropy, uncertain = np.full(len(owners), np.nan), np.zeros(len(owners), dtype=bool)
        if self.options[level].stopping == "entropy":
            entropy = entropy_nats(logits)
            uncertain = batch.thresholds.exceeded(level, owners, entropy)
        return Forward(logits, probs, entropy, uncertain)

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
