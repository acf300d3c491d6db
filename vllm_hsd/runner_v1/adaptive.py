"""Adaptive drafting on the V1 runner: the target's clock and the ranks."""

from __future__ import annotations

import numpy as np
from vllm.distributed.parallel_state import get_tp_group

from vllm_hsd.core import clock
from vllm_hsd.core.draft_budget import DraftBudget
from vllm_hsd.core.levels import LookupResult
from vllm_hsd.core.step_times import StepTimes


class StepClock:
    """Tells the times of the target's steps.

    Args:
        longest: most tokens of a request in a step without prompts.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.drafted: float | None = None

    def step_ended(self, scheduler_output, all_sampled: bool, times: StepTimes) -> None:
        """Between two drafts lie the target's step and all that vLLM does around it.

        Args:
            scheduler_output: vLLM's, of the step.
            all_sampled: every request of the batch got a token.
            times: what to tell.
        """
        now, cached = clock.seconds(), scheduler_output.scheduled_cached_reqs
        only_decodes = (
            all_sampled
            and not scheduler_output.scheduled_new_reqs
            and not cached.resumed_req_ids
            and max(scheduler_output.num_scheduled_tokens.values(), default=0) <= self.longest
        )
        if only_decodes and self.drafted is not None:
            times.observe(scheduler_output.total_num_scheduled_tokens, now - self.drafted)

    def drafting_ended(self) -> None:
        """The next step begins."""
        self.drafted = clock.seconds()


def agree_on_prices(
    budget: DraftBudget,
    slots: np.ndarray,
    most: np.ndarray,
    adaptive: bool,
    running: int,
    offer: LookupResult | None,
) -> None:
    """Set the prices of the next step: clocks differ by rank, and all ranks must draft alike.

    Args: see `DraftBudget.prices`.
    """
    group = get_tp_group()
    if group.rank_in_group > 0:
        budget.step = group.broadcast_object()
        return
    budget.step = budget.prices(slots, most, adaptive, running, offer)
    if group.world_size > 1:
        group.broadcast_object(budget.step)
