"""Adaptive drafting on a GPU: the scheduler's table of draft lengths, learned.

vLLM's scheduler reads the draft length of a batch from a table by its size. With `adaptive` the
entry is one of a few lengths or 0, whichever has been fastest.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from vllm_hsd.budget.batch_budget import BatchBudget
from vllm_hsd.config.sizes import learns_one_length
from vllm_hsd.host import metrics


class LearnedLengths:
    """Stands in the place of the scheduler's table, and is told of every step.

    Args:
        by_size: the scheduler's table: tokens by batch size, from which the lengths are taken.
        limit: most requests of a step that drafts.
        rows: drafts of a request that the target verifies together, in one list with their roots.
    """

    def __init__(self, by_size: list[int], limit: int, rows: int = 1) -> None:
        self.limit, self.rows = limit, rows
        lengths = [(tokens + 1) // rows - 1 for tokens in {*by_size} - {0}]
        self.learned = BatchBudget(lengths, len(by_size) - 1)
        self.ended = time.perf_counter()

    def __getitem__(self, size: int) -> int:
        """Draft tokens of each request in the next step with `size` of them."""
        length = self.learned.choose(size) if size <= self.limit else 0
        return self.rows * (length + 1) - 1 if length else 0

    def step_ended(self, scheduler_output: Any, model_runner_output: Any) -> None:
        """Take in the step that these belong to."""
        now = time.perf_counter()
        seconds, self.ended = now - self.ended, now
        scheduled = scheduler_output.num_scheduled_tokens
        verified = scheduler_output.scheduled_spec_decode_tokens
        length = scheduler_output.num_spec_tokens_to_schedule
        if scheduler_output.scheduled_new_reqs or not scheduled:
            return
        drafts = {request_id: len(verified.get(request_id, ())) for request_id in scheduled}
        # Neither prompts, nor steps between two choices; drafts end before max_model_len.
        if max(drafts.values()) != length or bool(min(drafts.values())) != bool(length):
            return
        if any(count != 1 + drafts[request_id] for request_id, count in scheduled.items()):
            return
        emitted = map(len, model_runner_output.sampled_token_ids)
        accepted = np.array([max(count - 1, 0) for count in emitted])
        # A draft has one row's tokens at most.
        self.learned.observe(max((length + 1) // self.rows - 1, 0), accepted, seconds)


def learn_lengths(scheduler: Any, config: Any) -> None:
    """Put a learned table in the place of the scheduler's, of a speculative configuration."""
    hsd = getattr(config, "hsd", None)
    if hsd is not None and learns_one_length(hsd) and scheduler.dynamic_sd_lookup is not None:
        limit = config.max_batch_size(scheduler.vllm_config.scheduler_config)
        learned = LearnedLengths(scheduler.dynamic_sd_lookup, limit, hsd.branches)
        scheduler.dynamic_sd_lookup = learned
        setattr(scheduler, metrics.STEP_ENDED, learned.step_ended)
