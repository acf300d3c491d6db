"""The cascade on a CPU, where scheduling waits for each step and the host reads every tensor.

Levels run as the recursion has it (`host_program`), read texts when they draft for them
(`level_caches`), and with `adaptive` take part where they pay (`host_budget`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch

from vllm_hsd.budget import clock
from vllm_hsd.budget.source_choice import SourcesLookup
from vllm_hsd.budget.step_times import TIMED_AT_START
from vllm_hsd.cascade.counters import Count
from vllm_hsd.cascade.level import DraftingLevel, Level, StepLevels
from vllm_hsd.cascade.proposal_state import KVGroups, ProposalState
from vllm_hsd.host.base_speculator import BaseSpeculator
from vllm_hsd.host.forced_tokens import FORCED
from vllm_hsd.host.host_branches import HostBranches
from vllm_hsd.host.host_budget import HostBudget
from vllm_hsd.host.host_estimates import estimates_of
from vllm_hsd.host.host_program import HostProgram
from vllm_hsd.host.host_sources import HostSources
from vllm_hsd.host.level_caches import LevelCaches


class HostSpeculator(BaseSpeculator):
    """A `BaseSpeculator` without CUDA graphs and fixed schedules.

    Attributes:
        caches: what the levels have computed.
        budget: with `adaptive`; None without.
    """

    program: HostProgram
    caches: LevelCaches
    budget: HostBudget | None = None
    more_sources = (FORCED,)

    @property
    def drawn(self) -> torch.Tensor | None:
        """As the base's; forced tokens are point masses."""
        drawn = super().drawn
        if not self.forced.any():
            return drawn
        kept = torch.from_numpy(self.forced == 0).float()
        return kept if drawn is None else drawn * kept

    def take_forced(self, forced: dict[str, list[int]]) -> None:
        """Let the target verify these tokens of requests, by name, instead of what was drafted."""
        state, states, row = self.state, self.req_states, self.counts.host.rows[-1]
        for name, tokens in forced.items():
            slot, count = states.req_id_to_index[name], len(tokens)
            at = int(state.row_of_slot[slot])
            # The target reads them in any case.
            states.draft_tokens[slot, :count] = torch.tensor(tokens)
            if at < 0:
                # It was not in the last step: no draft of it is verified.
                continue
            row[Count.drafted] += count
            state.draft_length[at] = self.forced[slot] = count
            # What the levels have drafted is not verified, and not in the text that they go on in.
            self.program.awaited[slot] = False
            if self.budget is not None:
                self.budget.awaits_verdict[slot] = False
            if self.thresholds is not None:
                # What the target rejects is no token of a level.
                self.thresholds.entropy[-1][at] = np.nan
            computed = self.caches.computed[:, slot]
            np.minimum(computed, int(states.total_len.gpu[slot]) - 1, out=computed)

    def _build_programs(self, levels: list[Level], groups: KVGroups) -> None:
        self.buckets: dict[int, ProposalState] = {}
        own = [
            None if level is None or level.in_target_cache or level is self.head else level
            for level in self.hosted
        ]
        if self.head is not None:
            self.head.read_late(self.max_num_reqs)
        self.caches = LevelCaches(self, own, self.max_num_reqs)
        # Entropies and horizontal tokens have ends of their own, lookups no rows.
        own_ends = self.thresholds is not None or self.hsd.horizontal_tokens > 0
        sources = self._sources()
        self.program = (HostProgram if sources is None else HostSources)(
            self.schedule,
            levels,
            groups,
            self.max_model_len,
            self.thresholds,
            sources,
            counts=self.counts.host,
            chosen=self.lookup.chosen.numpy() if isinstance(self.lookup, SourcesLookup) else None,
            caches=self.caches,
            estimates=estimates_of(self.hsd.levels[0], self.lookup) if self.hsd.adaptive else None,
        )
        if not self.hsd.adaptive:
            every = tuple(range(self.schedule.num_levels))
            self.program.everything = StepLevels(every, tuple(self.hsd.draft_lengths))
        else:
            lookups = [self.program.has_lookup, *[False] * (len(levels) - 1)]
            lengths = self.schedule.lengths_for_target, self.hsd.draft_lengths
            told = [
                DraftingLevel(longest, passed_on, looks_up, verifies, not (own_ends or looks_up))
                for longest, passed_on, looks_up, verifies in zip(
                    *lengths, lookups, self.hsd.verifying, strict=True
                )
            ]
            branches = cast(HostBranches | None, self.branches)
            self.budget = HostBudget(told, self.max_num_reqs, self.hsd.branches, branches)
            self.program.budget = self.budget
            self.program.everything = self.budget.budget.everything

    def _propose(self, computed, num_sampled, num_rejected, num_speculative_tokens) -> torch.Tensor:
        input_batch = computed[0]
        count = input_batch.num_reqs
        self._bound_seq_lens(input_batch)
        if self.head is not None:
            self.head.keep_step(input_batch)
        slots, program = input_batch.idx_mapping_np[:count], self.program
        self._take_in(input_batch, slots, num_sampled, num_rejected)
        if num_speculative_tokens == 0 or count > self.state.batch:
            # What the target has rejected is no text, however long the texts are when they draft.
            self.caches.committed(slots, self.req_states.total_len.gpu.numpy()[slots])
            if self.budget is not None:
                self.budget.nothing_drafted()
            return self._propose_nothing(program.selection.top, num_sampled, count)
        if count not in self.buckets:
            self.buckets[count] = self.state.bucket(count)
        state = self.buckets[count]
        inputs = input_batch.idx_mapping, num_sampled
        self._stage(state, self.schedule, *inputs, verified=program.selection.top)
        self._limit(state, input_batch, slots)
        program.begin(state)
        if self.branches is not None and not program.drafts.any():
            # No lookup runs, and what the last one has found is still there.
            cast(HostBranches, self.branches).none(state)
        if self.budget is None:
            program.run(state)
        else:
            left = self.req_states.max_seq_len[slots] - self.req_states.total_len.gpu.numpy()[slots]
            program.run(state, self.budget.select(program, state, count, left))
            self.budget.proposal_ended(program, state)
        return self._hand_over(state, slots)

    def select_levels(
        self, levels: list[int], draft_lengths: list[int], sources: list[int] | None = None
    ) -> None:
        """Draft with some of the levels from now on: one engine compares cascades.

        Args:
            levels: numbers of the levels, cheapest first.
            draft_lengths: one per level; the last is the draft that the target verifies.
            sources: numbers of those of the lowest level that draft; None for all.

        Raises:
            ValueError: unknown levels or sources, draft lengths that the engine was not started
                for, or drafts of one level that another would pass on at its own temperature.
        """
        longest = self.schedule.draft_lengths
        if (
            not levels
            or levels != sorted({*levels} & {*range(len(longest))})
            or len(levels) != len(draft_lengths)
            or any(not 0 < n <= longest[k] for k, n in zip(levels, draft_lengths, strict=True))
        ):
            raise ValueError(
                f"levels {levels} with draft lengths {draft_lengths} are not among those that the "
                f"engine was started for: {list(longest)}."
            )
        if self.hsd.scales_differ and levels[-1] != len(longest) - 1:
            raise ValueError(
                f"levels {levels} leave the last one out, which would pass on drafts of another "
                "temperature_scale: set it alike at all levels."
            )
        if sources is not None:
            if not isinstance(self.lookup, SourcesLookup):
                raise ValueError(f"levels[{levels[0]}] has no sources to select from.")
            self.lookup.select(sources)
        self.program.everything = StepLevels(tuple(levels), tuple(draft_lengths))

    def init_cudagraph_manager(self, cudagraph_mode) -> None:
        """A CPU has no CUDA graphs."""

    def capture(self) -> None:
        """A CPU has no CUDA graphs."""

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """All levels draft for the requests of vLLM's warm-up, then what these do not launch."""
        # Passes that compile kernels tell nothing of later ones.
        budget, self.budget, self.program.budget = self.budget, None, None
        yield
        self.budget = self.program.budget = budget
        if self.head is not None:
            self.head.warm_up()
        if budget is None:
            return
        # Where all levels draft, none passes on what another one has drafted.
        for size in (1, min(2, self.state.batch)):
            self.program.warm_up(self.state.bucket(size))

    def time_levels(self) -> None:
        """Time passes of levels before there are requests, in blocks that belong to none."""
        if self.budget is None:
            return
        slot = np.zeros(1, dtype=np.int64)

        def seconds_of(level: int, tokens: int) -> float:
            began = clock.seconds()
            self.caches.read(level, slot, np.array([tokens]))
            self.caches.computed[level, slot] = 0
            return clock.seconds() - began

        sizes = [min(tokens, self.max_model_len) for tokens in TIMED_AT_START]
        for level, model in enumerate(self.caches.levels):
            if model is None:
                continue
            # The first pass over so many tokens may compile a kernel.
            for tokens in sorted({*sizes}):
                seconds_of(level, tokens)
            for tokens in sizes:
                self.budget.timed(level, tokens, seconds_of(level, tokens))

    def _take_in(self, input_batch, slots, num_sampled, num_rejected) -> None:
        """What became of the last proposal, and which requests are new."""
        entered = self.parameters.entered
        self.caches.step_began(input_batch, entered)
        new = slots[entered[slots]]
        entered[new] = False
        forced = self.forced[slots]
        if self.program.chosen is not None or forced.any():
            accepted = np.maximum(num_sampled.numpy() - 1, 0)
            if self.branches is not None:
                accepted = np.minimum(accepted, cast(HostBranches, self.branches).accepted[slots])
            if self.program.chosen is not None:
                self.program.take_verdict(slots, accepted)
            kept = int(np.minimum(accepted, forced).sum())
            self.counts.host.rows[-1, Count.accepted] += kept
            # What a step has accepted is counted for the level whose drafts it was to verify.
            self.state.counts[self.program.selection.top, Count.accepted] -= kept
            self.forced[slots] = 0
        if self.budget is not None:
            # Before: the slot's last request may have ended with a draft that was never verified.
            for slot in new.tolist():
                self.budget.forget(slot)
            # What was drafted before a step that a request was not in is never verified.
            self.budget.awaits_verdict[slots] &= self.state.row_of_slot.numpy()[slots] >= 0
            sampled, rejected = num_sampled.numpy(), num_rejected.numpy()
            self.budget.step_ended(input_batch, self.program, sampled, rejected)
        self._forget(torch.from_numpy(new.astype(np.int64)))

    def _limit(self, state, input_batch, slots) -> None:
        """Draft neither the last token that max_tokens allows nor, with `adaptive`, the second.

        The target adds a token to every draft; and a first token does not wait for a model that
        reads the prompt.
        """
        requested, limits = state.requested[-1].numpy(), self.req_states.max_seq_len[slots]
        length = self.req_states.total_len.gpu.numpy()[slots]
        np.minimum(requested, np.maximum(limits - length - 1, 0), out=requested)
        if self.budget is not None and self.caches.keeps:
            first = length - input_batch.prefill_len_np[: len(slots)] == 1
            requested[first] = 0
