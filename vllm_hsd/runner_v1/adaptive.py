"""Adaptive depth on the V1 runner: the target's clock and the ranks."""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np
from vllm.distributed.parallel_state import get_tp_group

from vllm_hsd.core.cascade import Cascade
from vllm_hsd.core.counters import Count
from vllm_hsd.core.drafts import DraftStore
from vllm_hsd.core.levels import DraftBatch, Selection
from vllm_hsd.core.prices import Prices
from vllm_hsd.core.step_times import StepTimes


class Hosted(Protocol):
    """What is read of the proposer."""

    runner: Any
    cascade: Cascade


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
        now, cached = time.perf_counter(), scheduler_output.scheduled_cached_reqs
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
        self.drafted = time.perf_counter()


def agreed_prices(cascade: Cascade, size: int) -> list[Prices] | None:
    """What drafts cost with `size` requests: clocks differ by rank, and all ranks draft alike."""
    if cascade.learning.prices is None:
        return None
    group = get_tp_group()
    if group.rank_in_group > 0:
        return group.broadcast_object()
    prices = cascade.learning.current_prices(size)
    if group.world_size > 1:
        group.broadcast_object(prices)
    return prices


class AdaptiveDrafting:
    """Drafts with the levels and draft lengths that the cascade's controller selects.

    A level that is not selected computes nothing, prompts included. It catches up in one forward
    pass when it is selected again.

    Args:
        host: the proposer.
    """

    def __init__(self, host: Hosted) -> None:
        assert host.cascade.learning.controller is not None
        self.host, self.controller = host, host.cascade.learning.controller

    def propose(self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray) -> DraftStore:
        """Draft at most requested[i] tokens for the request in slots[i].

        Sampled requests with a seed draft by the configured lengths: they repeat at any load.
        """
        cascade, input_batch = self.host.cascade, self.host.runner.input_batch
        drafts = cascade.drafts[-1]
        drafts.clear(slots)
        committed = batch.end[slots].copy()
        assert batch.repeats is not None
        fixed = batch.repeats[slots]
        free = ~fixed & (requested > 0)
        if fixed.any():
            cascade.propose(batch, slots[fixed], requested[fixed])
        if free.any():
            first = committed - input_batch.num_prompt_tokens[: len(slots)] == 1
            selection, lengths = self._select(slots[free], requested[free], first[free])
            none = int((lengths == 0).sum())
            counters = cascade.counters
            counters.rows[counters.num_levels - 1, [Count.requested, Count.empty]] += none
            if lengths.any():
                cascade.propose(batch, slots[free], lengths, selection)
        return drafts

    def _select(
        self, slots: np.ndarray, most: np.ndarray, first: np.ndarray
    ) -> tuple[Selection, np.ndarray]:
        """Levels and draft lengths of the next step; requests in `first` have their first token."""
        group = get_tp_group()
        if group.rank_in_group > 0:
            return group.broadcast_object()
        selection, lengths = self.controller.choose(slots, most)
        levels = self.host.cascade.levels
        if any(levels[level] is not None for level in selection.levels):
            # A first token does not wait for a model to read the prompt.
            lengths = np.where(first, 0, lengths)
        # Clocks differ by rank, and all ranks must draft alike.
        if group.world_size > 1:
            group.broadcast_object((selection, lengths))
        return selection, lengths
