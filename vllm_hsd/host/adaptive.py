"""Adaptive drafting on a GPU: the scheduler's table of draft lengths, learned.

vLLM's scheduler reads the draft length of a batch from a table by its size. With `adaptive` the
entry is one of a few lengths or 0, whichever has been fastest.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from vllm_hsd.budget.batch_budget import BatchBudget
from vllm_hsd.host import metrics
from vllm_hsd.host.hooks import REGISTRY
from vllm_hsd.host.registry import NONE_FILED


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


@REGISTRY.replaces(
    "vllm.v1.core.sched.scheduler.Scheduler.__init__",
    None,
    why="puts a learned table in the place of the fixed one of draft lengths by batch size",
    until="a plugin can choose the draft length of a step",
    issue=NONE_FILED,
)
def make_scheduler(original, self, *args, **kwargs):
    from vllm_hsd.config.sizes import learns_one_length

    original(self, *args, **kwargs)
    hsd = getattr(self.vllm_config.speculative_config, "hsd", None)
    if hsd is not None and learns_one_length(hsd) and self.dynamic_sd_lookup is not None:
        limit = self.vllm_config.speculative_config.max_batch_size(
            self.vllm_config.scheduler_config
        )
        learned = LearnedLengths(self.dynamic_sd_lookup, limit, hsd.branches)
        self.dynamic_sd_lookup = learned
        setattr(self, metrics.STEP_ENDED, learned.step_ended)
