"""One proposal where the host reads what the device holds: a CPU.

The recursion of "Fast Inference via Hierarchical Speculative Decoding" (Algorithm 1), by the
kernels of `program`: rounds go on until a draft is full, a pass that no request wants is not run,
and a pass is over what its level has not computed. `vllm_hsd.tools.reference.simple` is the
same for one request, in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_hsd.budget import clock
from vllm_hsd.cascade import cascade_steps
from vllm_hsd.cascade.counters import Count, LevelCounts
from vllm_hsd.cascade.level import LookupResult, StepLevels
from vllm_hsd.cascade.program import Program
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.cascade.schedule import DRAWS_PER_LENGTH, Draft, Lookup, Verify, uncached_bound
from vllm_hsd.host.level_caches import LevelCaches


class HostProgram(Program):
    """A cascade of which some levels may be left out of a proposal.

    Args:
        counts: of the levels, and of the lowest one's sources.
        chosen: int32 [slots + 1], the source that drafts for each slot; None for one source.
        caches: what levels have computed.
        estimates: of the tokens that the lookup has drafted, [B, n] float64, from what it returned.

    Attributes:
        budget: a `HostBudget`, which imports this module: learns from passes and ends drafts; None:
            until all drafts are full.
        estimate: by level [slots, n] float64, acceptance of the tokens of the last drafts by the
            drafter's own account, NaN for none.
        has_lookup: level 0 drafts without forward passes.
        most_replaced: tokens of level 0's own draft that it has not computed, at most.
        logits: [B, n, V] of the last pass.
    """

    logits: torch.Tensor
    budget: Any = None
    most_replaced = 1

    def __init__(
        self,
        *args: Any,
        counts: LevelCounts,
        chosen: np.ndarray | None = None,
        caches: LevelCaches,
        estimates: Callable[[ProposalState, Any], np.ndarray] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.caches, self.counts, self.chosen = caches, counts, chosen
        self.estimates = estimates
        self.lanes = self.schedule.longest_query
        levels, slots = self.schedule.num_levels, caches.computed.shape[1]
        self.everything = StepLevels(tuple(range(levels)), self.schedule.draft_lengths)
        self.selection = self.everything
        self.draws = [0] * levels
        self.estimate = [np.full((slots, n), np.nan) for n in self.schedule.kept_lengths]
        self.drafted_ahead = False
        # Slots whose drafts the target verifies, of sources right below it.
        self.awaited = np.zeros(slots, dtype=bool)
        self.has_lookup = self.sources is None and isinstance(self.schedule.ops[0], Lookup)

    def begin(self, state: ProposalState) -> None:
        """After `stage`, before anything else of a proposal."""
        self.draws = [0] * len(self.draws)
        self.slots = state.slot.numpy().astype(np.int64)
        self.base = state.base.numpy()
        self.drafts = state.requested[-1].numpy() > 0
        self.caches.committed(self.slots[self.drafts], self._text_ends()[self.drafts])
        self.drafted_ahead = False

    def draft_ahead(self, state: ProposalState, drafts: np.ndarray) -> LookupResult:
        """Let the lookup of level 0 draft for the target; of the requests in `drafts`, bool [B]."""
        state.requested[0].copy_(state.requested[-1].clamp(max=self.schedule.draft_lengths[0]))
        self.drafted_ahead = True
        self._look_up(state)
        counts = state.drafted[0].numpy()[drafts].astype(np.int64)
        estimate = self.estimate[0][self.slots[drafts]]
        return LookupResult(np.zeros(estimate.shape, np.int64), counts, np.cumprod(estimate, 1))

    def _look_up(self, state: ProposalState) -> None:
        """A draft of the lookup, and how sure it is of each token."""
        began = clock.seconds()
        found = self.levels[0].runs(state)
        self.counts.add_time(0, clock.seconds() - began)
        if self.estimates is not None:
            wanted = state.requested[0].numpy() > 0
            self.estimate[0][self.slots[wanted]] = self.estimates(state, found)[wanted]

    def run(self, state: ProposalState, selection: StepLevels | None = None) -> None:
        """Draft for all requests of `state`.

        Args:
            selection: the levels that take part, all or none where drafts end by entropy; None for
                all. May depend on committed text, on `draft_ahead`, past acceptance and times.
                `most` is of the requests that may draft.
        """
        self.selection = selection or self.everything
        self._limit(state)
        if self.selection.levels:
            self._catch_up(state)
            self._draft(state, self.schedule.num_levels - 1)
            if self.schedule.horizontal_tokens:
                cascade_steps.begin_tail(state, self.schedule)
                self._draft_lowest(state)
        self._finish(state, self.selection.top)
        drafted, top = state.draft_length.numpy()[self.drafts], self.selection.top
        slots = self.slots[self.drafts]
        if self.selection.levels:
            self.counts.add_requests(top, state.requested[-1].numpy()[self.drafts], drafted)
            self._add_tokens(top, Count.drafted, slots, drafted)
        self.awaited[slots] = (drafted > 0) & (top == 0)

    def take_verdict(self, slots: np.ndarray, accepted: np.ndarray) -> None:
        """The target's step has ended: int64 [n], tokens that it accepted of each slot's draft.

        Of programs with several sources alone.
        """
        own = self.awaited[slots]
        self._add_tokens(0, Count.accepted, slots[own], accepted[own])
        self.awaited[slots] = False

    def _add_tokens(self, level: int, column: Count, slots: np.ndarray, tokens: np.ndarray) -> None:
        if self.chosen is not None and level == 0:
            self.counts.add_source_tokens(column, self.chosen[slots], tokens)

    def most_verified(self, op: Verify) -> int:
        return self.schedule.kept_lengths[op.level - 1]

    def _limit(self, state: ProposalState) -> None:
        """Open drafts as long as the selection has it; one made ahead that is too long is cut."""
        levels, most = self.selection.levels, self.selection.most
        lengths = state.draft_lengths.numpy()
        lengths[:] = self.schedule.draft_lengths
        # Drafts for the target are limited request by request.
        for k, length in zip(levels[:-1], self.selection.draft_lengths, strict=False):
            lengths[k] = min(lengths[k], length)
        lengths[: levels[0] if levels else -1] = 0
        requested = state.requested.numpy()
        longest = self.selection.draft_lengths[-1] if levels else 0
        np.minimum(requested[-1], longest, out=requested[-1])
        if most is not None and levels:
            requested[-1][self.drafts] = np.minimum(requested[-1][self.drafts], most)
        self._ask_all(state)

    def _ask_all(self, state: ProposalState) -> None:
        """Request drafts of all levels, for what the top one is to have."""
        self._ask_below(state, self.schedule.num_levels - 1, again=not self.drafted_ahead)
        if self.drafted_ahead:
            kept = np.minimum(state.drafted.numpy()[0], state.requested.numpy()[0])
            state.drafted.numpy()[0] = kept
            state.end.numpy()[:] = state.start.numpy()[0] + kept

    def _ask_below(self, state: ProposalState, level: int, again: bool = True) -> None:
        """Request drafts from the levels below; with `again`, new ones at the end of the text."""
        start, drafted, requested = (
            each.numpy() for each in (state.start, state.drafted, state.requested)
        )
        for k in range(level - 1, -1, -1):
            # A level that is left out adds no token of its own.
            own = int(k + 1 in self.selection.levels)
            room = requested[k + 1] - (drafted[k + 1] if again else 0) - own
            requested[k] = np.minimum(np.maximum(room, 0), state.draft_lengths.numpy()[k])
            if again:
                start[k], drafted[k] = state.end.numpy(), 0

    def _catch_up(self, state: ProposalState) -> None:
        """Let the levels that will draft read what they have missed, but for the last token.

        Requests of which they have not read all draft later.
        """
        drafts = self.drafts & (state.requested[-1].numpy() > 0)
        late = np.zeros_like(drafts)
        for k in self.selection.levels:
            if k or self._reads_all():
                late |= self._read(k, drafts)
        if late.any():
            state.requested[-1].numpy()[late] = 0
            self._ask_all(state)

    def _reads_all(self) -> bool:
        """Whether level 0 reads every text of a proposal, not only those that it drafts for."""
        return True

    def _read(self, level: int, drafts: np.ndarray) -> np.ndarray:
        """Let a level read texts; bool [B], those of which more is left than a pass may feed."""
        ends, computed = self._text_ends(), self.caches.computed[level]
        if self.caches.levels[level] is None:
            computed[self.slots[drafts]] = ends[drafts] - 1
            # What a head reads has no price: in the next step it would have to read it as well.
            if self._is_late_head(level):
                head, began = self.levels[level].runs, clock.seconds()
                rows = np.flatnonzero(drafts & (head.unread.count[self.slots] > 0))
                head.read(self.slots[rows], rows)
                self.counts.add_time(level, clock.seconds() - began, passes=int(len(rows) > 0))
            return np.zeros_like(drafts)
        replaced = 1 if level else self.most_replaced
        allowed = uncached_bound(level, self.schedule.num_levels, replaced)
        allowed += self.schedule.horizontal_tokens
        late: np.ndarray = drafts & (ends - computed[self.slots] > allowed)
        if late.any():
            began = clock.seconds()
            read = self.caches.read(level, self.slots[late], ends[late] - 1)
            self.counts.add_time(level, clock.seconds() - began, passes=int(read > 0))
            if self.budget is not None:
                self.budget.timed(level, read, clock.seconds() - began)
            late &= ends - computed[self.slots] > allowed
        return late

    def missed(self, level: int) -> np.ndarray:
        """[n] tokens that a level would have to read before it drafts for these requests."""
        if self.caches.levels[level] is None:
            return np.zeros(np.count_nonzero(self.drafts))
        ends = self._text_ends()[self.drafts] - 1
        return self.caches.missed(level, self.slots[self.drafts], ends)

    def _is_late_head(self, level: int) -> bool:
        """Whether a level reads the target's states before its first pass of a proposal."""
        return getattr(self.levels[level].runs, "unread", None) is not None

    def _text_ends(self) -> np.ndarray:
        ends: np.ndarray = self.base + self.schedule.window
        return ends

    def _wants(self, state: ProposalState, level: int) -> np.ndarray:
        wants: np.ndarray = state.drafted[level].numpy() < state.requested[level].numpy()
        return wants

    def _draft(self, state: ProposalState, level: int) -> None:
        """A draft of one level for all requests that want one."""
        if level == 0:
            self._draft_lowest(state)
        elif level in self.selection.levels:
            self._draft_verified(state, level)
        else:
            self._ask_below(state, level, again=not self.drafted_ahead)
            self._draft(state, level - 1)
            self._pass_on(state, level)

    def _draft_lowest(self, state: ProposalState) -> None:
        if 0 not in self.selection.levels or not self._wants(state, 0).any():
            self.drafted_ahead = False
            return
        if self.has_lookup:
            if not self.drafted_ahead:
                self._look_up(state)
            self.drafted_ahead = False
            return
        every = np.ones(state.batch, dtype=bool)
        self._draft_by_passes(state, every, every)

    def _draft_by_passes(self, state: ProposalState, first: np.ndarray, rest: np.ndarray) -> None:
        """A token of level 0 by each pass.

        Args:
            first, rest: bool [B], requests that take part in the first pass and in later ones.
        """
        step, draw = 0, self.draws[0]
        self.draws[0] += int(state.requested[0].max())
        while (wants := first & (state.requested[0].numpy() > step)).any():
            began = clock.seconds()
            computed = self._pass(state, 0, wants, draw + step, step=step)
            if self.budget is not None:
                self.budget.timed(0, computed, clock.seconds() - began)
            self._end_drafts(state, 0, wants, np.full(state.batch, step))
            step, first = step + 1, rest

    def warm_up(self, state: ProposalState) -> None:
        """Launch what a proposal of all levels may not, for no request."""
        state.origin.fill_(-1)
        if self.has_lookup:
            # A head that verifies nothing drafts in its place.
            state.requested[0].zero_()
            self.levels[0].runs(state)
        for level in range(1, self.schedule.num_levels):
            cascade_steps.pass_on(state, level, self.schedule.kept_lengths[level - 1])

    def _draft_verified(self, state: ProposalState, level: int) -> None:
        """Rounds of a draft from below and its verification, until every draft is full."""
        own = self.levels[level]
        rounds, most = 0, own.max_rounds
        feeder, _ = self.selection.below(level)
        while (wants := self._wants(state, level)).any() and (most is None or rounds < most):
            began = clock.seconds()
            requested = state.requested[level - 1].numpy().copy()
            self._draft(state, level - 1)
            drafted, counts = clock.seconds(), state.drafted[level - 1].numpy().copy()
            before = state.drafted[level].numpy().copy()
            self.counts.add_requests(feeder, requested[wants], counts[wants])
            self._add_tokens(feeder, Count.drafted, self.slots[wants], counts[wants])
            longest = int(counts[wants].max())
            draw = self.draws[level]
            self.draws[level] += 1 if own.verifier == "none" else longest + 1
            if self.draws[level] > DRAWS_PER_LENGTH:
                return
            passed_on = None if feeder == level - 1 else state.counts[level - 1].clone()
            computed = self._pass(state, level, wants, draw, longest, below=level - 1)
            if passed_on is not None:
                # The kernel counts for the level below, which has only passed the draft on.
                state.counts[feeder] += state.counts[level - 1] - passed_on
                state.counts[level - 1] = passed_on
            rounds += 1
            slots = self.slots[wants]
            accepted = state.drafted[level].numpy() - before - 1
            self._add_tokens(feeder, Count.accepted, slots, np.maximum(accepted[wants], 0))
            if self.budget is not None:
                self.budget.level_verified(
                    feeder,
                    level,
                    slots,
                    requested=requested[wants],
                    drafted=counts[wants].astype(np.int64),
                    estimates=self.estimate[feeder][slots],
                    accepted=np.maximum(accepted[wants], 0),
                    computed=computed,
                    drafting_seconds=drafted - began,
                    verifying_seconds=clock.seconds() - drafted,
                )
            self._end_drafts(state, level, wants, before)

    def _end_drafts(
        self, state: ProposalState, level: int, wants: np.ndarray, before: np.ndarray
    ) -> None:
        """End drafts for the target that are not worth another pass, by the rows of their tokens.

        What a round has added stays, as it is: a round is lossless wherever it ends.

        Args:
            wants: bool [B], requests whose drafts a pass has made longer.
            before: [B] int, their tokens before it.
        """
        budget = self.budget
        if budget is None or level != self.selection.top or not budget.ends(level):
            return
        drafted, requested = state.drafted[level].numpy(), state.requested.numpy()
        places = np.arange(self.estimate[level].shape[1])
        new = wants[:, None] & (places >= before[:, None]) & (places < drafted[:, None])
        request, place = new.nonzero()
        # The largest probability at temperature 1; what it is worth is learned.
        row = torch.from_numpy(request), torch.from_numpy(place - before[request])
        sure = torch.softmax(self.logits[row], 1, dtype=torch.float32).amax(1)
        self.estimate[level][self.slots[request], place] = sure.numpy()
        slots = self.slots[wants]
        more = budget.goes_on(level, slots, self.estimate[level][slots], drafted[wants])
        requested[level, wants] = np.where(more, requested[level, wants], drafted[wants])
        # Nothing is drafted below for a request whose draft has ended.
        requested[:level, drafted >= requested[level]] = 0

    def _pass(
        self,
        state: ProposalState,
        level: int,
        wants: np.ndarray,
        draw: int,
        draft: int = 0,
        *,
        step: int = 0,
        below: int | None = None,
    ) -> int:
        """A forward pass over what the level has not computed, and what it adds to the text.

        Args:
            wants: bool [B], requests for which it runs.
            draw: see `schedule.Draft`.
            draft: most tokens that it verifies of any of them.

        Returns:
            tokens of the pass; 0 where the level had computed them already.
        """
        computed = self.caches.computed[level]
        text = self.base + state.end.numpy()
        first = text if below is None else self.base + state.start[below].numpy()
        running = self._wants(state, self.schedule.num_levels - 1)
        missing = first - computed[self.slots]
        query = int(missing[wants].max()) + draft
        assert draft < query <= self.lanes
        op = Draft(0, step, query, draw) if below is None else Verify(level, query, draft, draw)
        began = clock.seconds()
        logits = self._run_level(state, op)
        self.logits = logits.view(state.batch, -1, logits.shape[1])
        # A head has read before the proposal what its first draft needs.
        read = draw == 0 and self._is_late_head(level)
        self.counts.add_time(level, clock.seconds() - began, passes=0 if read else 1)
        # A pass that began after a hole has filled nothing that can be used.
        whole = running & (missing + draft <= query)
        reached = np.minimum(text, state.limit.numpy() + 1)
        computed[self.slots[whole]] = np.maximum(reached, computed[self.slots])[whole]
        self._forget_rejected(state, wants)
        return 0 if read else state.batch * query

    def _forget_rejected(self, state: ProposalState, changed: np.ndarray) -> None:
        """Of texts that end in a token that no level has computed."""
        slots = self.slots[changed]
        last = (self.base + state.end.numpy() - 1)[changed]
        self.caches.computed[:, slots] = np.minimum(self.caches.computed[:, slots], last)

    def _pass_on(self, state: ProposalState, level: int) -> None:
        """Make the draft from below that of a level which is left out."""
        opens = state.requested[level].numpy() > 0
        state.origin.numpy()[:] = np.where(opens, state.drafted[level].numpy(), -1)
        cascade_steps.pass_on(state, level, self.schedule.kept_lengths[level - 1])
