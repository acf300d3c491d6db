"""Adaptive drafting on the V2 runner: the scheduler's table of draft lengths, learned.

vLLM's scheduler reads the draft length of a batch from a table by its size. With `adaptive` the
entry is the configured length or 0, whichever has been faster.
"""

from __future__ import annotations

import time
from typing import Any

from vllm_hsd import metrics
from vllm_hsd.core.batch_budget import BatchBudget
from vllm_hsd.registry import NONE_FILED
from vllm_hsd.runner_v2.hooks import REGISTRY


class LearnedLengths:
    """Stands in the place of the scheduler's table, and is told of every step.

    Args:
        by_size: the scheduler's table: most tokens by batch size.
    """

    def __init__(self, by_size: list[int]) -> None:
        self.by_size = by_size
        self.learned = BatchBudget(max(by_size), len(by_size) - 1)
        self.ended = time.perf_counter()

    def __getitem__(self, size: int) -> int:
        """The draft length of the next step with `size` requests."""
        return self.learned.choose(size) if self.by_size[size] else 0

    def step_ended(self, scheduler_output: Any, model_runner_output: Any) -> None:
        """Take in the step that these belong to."""
        now = time.perf_counter()
        seconds, self.ended = now - self.ended, now
        scheduled = scheduler_output.num_scheduled_tokens
        verified = scheduler_output.scheduled_spec_decode_tokens
        drafted = scheduler_output.num_spec_tokens_to_schedule > 0
        if scheduler_output.scheduled_new_reqs or not scheduled:
            return
        for request_id, count in scheduled.items():
            drafts = len(verified.get(request_id, ()))
            # Neither prompts, nor steps between two choices.
            if count != 1 + drafts or bool(drafts) != drafted:
                return
        emitted = sum(map(len, model_runner_output.sampled_token_ids))
        self.learned.observe(len(scheduled), drafted, emitted, seconds)


@REGISTRY.replaces(
    "vllm.v1.core.sched.scheduler.Scheduler.__init__",
    None,
    why="puts a learned table in the place of the fixed one of draft lengths by batch size",
    until="a plugin can choose the draft length of a step",
    issue=NONE_FILED,
)
def make_scheduler(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    hsd = getattr(self.vllm_config.speculative_config, "hsd", None)
    if hsd is not None and hsd.adaptive and self.dynamic_sd_lookup is not None:
        by_size = self.dynamic_sd_lookup
        limit = self.vllm_config.speculative_config.max_batch_size(
            self.vllm_config.scheduler_config
        )
        if len(by_size) - 1 <= limit:
            # `V2CascadeConfig.adapt` has put 0 there.
            by_size[-1] = max(by_size)
        learned = LearnedLengths(by_size)
        self.dynamic_sd_lookup = learned
        setattr(self, metrics.STEP_ENDED, learned.step_ended)
