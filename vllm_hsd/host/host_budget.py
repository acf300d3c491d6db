"""How much is drafted on a CPU, and by which levels: `budget.draft_budget`, hosted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from vllm.distributed.parallel_state import get_tp_group

from vllm_hsd.budget import clock
from vllm_hsd.budget.draft_budget import DraftBudget
from vllm_hsd.budget.prices import NOTHING_MORE
from vllm_hsd.cascade.level import DraftingLevel, StepLevels
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.host.host_branches import HostBranches
from vllm_hsd.host.host_program import HostProgram


class HostBudget:
    """Selects the levels and the draft length of every request, by what was learned while serving.

    Args:
        levels: cheapest first.
        max_num_reqs: request slots.
        rows: most drafts of a request that the target verifies together.
        branches: of the requests; None where the target verifies chains.

    Attributes:
        top, lengths: int64 [slots], the level whose draft the target verifies, and its tokens.
    """

    def __init__(
        self,
        levels: list[DraftingLevel],
        max_num_reqs: int,
        rows: int = 1,
        branches: HostBranches | None = None,
    ) -> None:
        self.budget = DraftBudget(levels, max_num_reqs, rows)
        self.level_verified = self.budget.level_verified
        # Most tokens of a request in a step without prompts.
        self.most_tokens = rows * (levels[-1].longest + 1)
        self.top = np.zeros(max_num_reqs, dtype=np.int64)
        self.lengths = np.zeros(max_num_reqs, dtype=np.int64)
        self.awaits_verdict = np.zeros(max_num_reqs, dtype=bool)
        self.drafted: float | None = None
        self.began = self.searching = 0.0
        self.further = NOTHING_MORE
        self.branches = branches

    def step_ended(
        self, input_batch: Any, program: HostProgram, sampled: np.ndarray, rejected: np.ndarray
    ) -> None:
        """Take in a step of the target: [n] tokens that requests sampled, and were fed in vain."""
        count = input_batch.num_reqs
        slots, now = input_batch.idx_mapping_np[:count], clock.seconds()
        emitted = accepted = np.maximum(sampled - 1, 0)
        if self.branches is not None:
            rejected = np.full_like(accepted, self.most_tokens)
            accepted = np.minimum(self.branches.accepted[slots], emitted)
        followed = int((emitted - accepted).sum())
        # Drafts that were cut, or not verified, say nothing of their other tokens.
        told = self.awaits_verdict[slots] & (sampled > 0)
        drafted = np.where(told, np.minimum(self.lengths[slots], accepted + rejected), 0)
        accepted = np.where(told, accepted, 0)
        for top in sorted({*self.top[slots[told]].tolist()}):
            own = told & (self.top[slots] == top)
            estimates = program.estimate[top][slots[own]]
            verified = drafted[own], estimates, accepted[own]
            self.budget.learn_acceptance(top, self.budget.target, slots[own], *verified)
        self.awaits_verdict[slots] = False
        ended = sampled > 0
        self.budget.step_ended(slots[ended], drafted[ended], accepted[ended], followed)
        scheduled = input_batch.num_scheduled_tokens[:count]
        decodes = not input_batch.has_prefill and (sampled > 0).all()
        if decodes and self.drafted is not None and scheduled.max() <= self.most_tokens:
            tokens = int(scheduled.sum())
            self.budget.times[-1].observe(tokens, now - self.drafted, apart=tokens == count)
        self.began = now

    def ends(self, level: int) -> bool:
        """Whether a level's drafts for the target are asked to go on after each pass."""
        return self.budget.levels[level].ends

    def goes_on(
        self, level: int, slots: np.ndarray, estimates: np.ndarray, drafted: np.ndarray
    ) -> np.ndarray:
        """Whether a model's drafts are worth a further pass, see `DraftBudget.goes_on`."""
        asked = level, slots, estimates, drafted, self.further
        found: np.ndarray = _agreed(partial(self.budget.goes_on, *asked))
        return found

    def timed(self, level: int, tokens: int, seconds: float) -> None:
        """A level has drafted a token, or read what it had missed, in one pass."""
        if not self.budget.levels[level].looks_up:
            self.budget.times[level].observe(tokens, seconds)

    def select(
        self, program: HostProgram, state: ProposalState, running: int, left: np.ndarray
    ) -> StepLevels:
        """What is drafted in this step, after `HostProgram.begin`.

        Args:
            running: requests of the step.
            left: [B] int64 tokens that requests may still get.
        """
        drafts, offer, self.searching = program.drafts, None, 0.0
        slots, most = program.slots[drafts], state.requested[-1].numpy()[drafts].astype(np.int64)
        if program.has_lookup and len(slots):
            began, alone = clock.seconds(), self.budget.target == 1
            if _agreed(partial(self.budget.searches_for, len(slots))):
                offer = program.draft_ahead(state, drafts)
            elif alone:
                if self.branches is not None:
                    self.branches.none(state)
                    self.budget.branch_tokens[slots] = 0
                return StepLevels()
            search = clock.seconds() - began
        late = self._late(program, len(slots))
        plan = _agreed(partial(self.budget.plan, slots, most, running, offer, late, left[drafts]))
        selected, self.further = plan.selection, plan.further
        if offer is not None:
            self.searching = clock.seconds() - began
            # Of lookups alone nothing is planned where nothing is searched for.
            cost = self.searching if alone else search
            self.budget.searched(len(slots), running, cost, plan.gained)
        if selected.levels and program.thresholds is not None:
            # Entropies of a draft are those of all levels.
            selected = replace(program.everything, most=selected.most)
        if self.branches is not None and offer is not None:
            chains = self.budget.survival(slots, offer)
            kept = self.branches.keep_what_pays(state, drafts, chains, plan.verify)
            self.budget.branch_tokens[slots] = kept
        return selected

    def _late(self, program: HostProgram, count: int) -> np.ndarray:
        """[levels, n] seconds in which a level reads what it has missed of requests that draft."""
        found = np.zeros((self.budget.target, count))
        for k, times in enumerate(self.budget.times[:-1]):
            missed = program.missed(k)
            if (whole := missed.sum()) and not times.empty:
                found[k] = times.seconds(whole) * missed / whole
        return found

    def proposal_ended(self, program: HostProgram, state: ProposalState) -> None:
        """Take in what was drafted for the target."""
        slots, top = program.slots[program.drafts], program.selection.top
        drafted = state.draft_length.numpy()[program.drafts].astype(np.int64)
        self.top[slots], self.lengths[slots] = top, drafted
        self.awaits_verdict[slots] = drafted > 0
        self.drafted = clock.seconds()
        requested = state.requested[-1].numpy()[program.drafts].astype(np.int64)
        searched = program.has_lookup and not top
        seconds = self.searching if searched else self.drafted - self.began
        if len(slots):
            self.budget.drafted_for_target(top, slots, requested, drafted, seconds)

    def forget(self, slot: int) -> None:
        """The slot has a new request."""
        self.budget.forget(slot)
        self.awaits_verdict[slot] = False

    def nothing_drafted(self) -> None:
        """The step has no proposal."""
        self.drafted = clock.seconds()


def _agreed(found: Callable[[], Any]) -> Any:
    """What rank 0 finds: clocks differ by rank, and all ranks must draft alike."""
    group = get_tp_group()
    if group.world_size == 1:
        return found()
    return group.broadcast_object(found() if group.rank_in_group == 0 else None)
