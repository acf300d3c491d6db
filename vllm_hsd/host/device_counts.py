"""Counts per level of a cascade, which stay on the device until they are there.

No step waits for them: a copy is enqueued after a proposal, and the first step after it has
arrived attaches what was counted since the last one (see `vllm_hsd.host.metrics`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from vllm_hsd.cascade.counters import Count, LevelCounts
from vllm_hsd.cascade.schedule import Schedule
from vllm_hsd.host import metrics
from vllm_hsd.host.hooks import REGISTRY, RUNNER
from vllm_hsd.kernels.step_kernels import INVALID

logger = logging.getLogger(__name__)


class DeviceCounts:
    """Reads the counts of a `ProposalState`, next to those that the host keeps.

    Args:
        counts: int64 [L, 4], `ProposalState.counts`, whose first columns are those of `Count`.
        levels: what messages call them.
        sources: names of those of the lowest level.

    Attributes:
        host: forward passes, and on a CPU times, what found nothing, sources and branches.
    """

    def __init__(
        self, counts: torch.Tensor, levels: Sequence[str], sources: Sequence[str] = ()
    ) -> None:
        self.counts, self.levels = counts, levels
        self.on_host = torch.zeros(counts.shape, dtype=counts.dtype, pin_memory=counts.is_cuda)
        self.arrived = torch.cuda.Event() if counts.is_cuda else None
        self.is_copying = False
        self.taken = torch.zeros_like(self.on_host)
        self.host = LevelCounts.zeros(len(counts), sources)
        self.warned: set[int] = set()

    def add_proposal(self, schedule: Schedule) -> None:
        """Count the forward passes of a proposal."""
        for k, passes in enumerate(schedule.passes):
            self.host.rows[k, Count.forwards] += passes

    def take(self) -> LevelCounts | None:
        """What was counted since the last call that returned it; None where it is not there yet."""
        if not self.is_copying:
            self.on_host.copy_(self.counts, non_blocking=True)
            if self.arrived is not None:
                self.arrived.record()
            self.is_copying = True
        if self.arrived is not None and not self.arrived.query():
            return None
        self.is_copying = False
        new, self.taken = self.on_host - self.taken, self.on_host.clone()
        for level in set(new[:, INVALID.value].nonzero().flatten().tolist()) - self.warned:
            self.warned.add(level)
            logger.warning(
                "%s gives logits that are not finite; its drafts are arbitrary there, "
                "which costs acceptance: check its weights and dtype.",
                self.levels[level],
            )
        counts = self.host.take()
        counts.rows[: len(new), : Count.forwards] += new[:, : Count.forwards].numpy()
        return counts


@REGISTRY.replaces_on_runner(
    f"{RUNNER}.sample_tokens",
    "self grammar_output",
    why="attaches the counts of every level to the step's output",
    until="vLLM carries a drafter's own statistics",
)
def sample_tokens(original, speculator: Any, grammar_output):
    output = original(grammar_output)
    if output is not None and (levels := speculator.counts.take()) is not None:
        setattr(output.model_runner_output, metrics.ATTRIBUTE, levels)
    return output
