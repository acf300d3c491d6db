"""The load of an engine that is verified, set while it runs; all of this runs in its process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_hsd.budget.prices import Plan


@dataclass(frozen=True)
class Load:
    """How an engine is to be loaded.

    Attributes:
        at_once: requests that are served together; None for as many as the engine takes.
        chunk: tokens of a step, so that longer prompts are read in chunks; None as above.
        blocks: blocks of the KV cache that are free at most, so that requests are preempted; None
            as above.
        fixed_lengths: draft as much as the configuration allows, whatever that costs.
    """

    at_once: int | None = None
    chunk: int | None = None
    blocks: int | None = None
    fixed_lengths: bool = False


def apply(llm: Any, load: Load) -> None:
    """Load the engine so from now on, in the place of the load before."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    config = llm.llm_engine.vllm_config.scheduler_config
    scheduler.max_num_active_reqs = load.at_once or config.max_num_seqs
    given = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    scheduler.max_num_scheduled_tokens = min(load.chunk or given, given)
    pool = scheduler.kv_cache_manager.block_pool
    pool.free_blocks(getattr(scheduler, "vllm_hsd_held", []))
    spare = 0 if load.blocks is None else pool.get_num_free_blocks() - load.blocks
    scheduler.vllm_hsd_held = pool.get_new_blocks(max(spare, 0))
    if (learned := getattr(scheduler.dynamic_sd_lookup, "learned", None)) is not None:
        vars(learned).pop("choose", None)
        if load.fixed_lengths:
            learned.choose = lambda size: max(learned.lengths)
    llm.collective_rpc(_fix_lengths, args=(load.fixed_lengths,))


def _fix_lengths(worker: Any, fixed: bool) -> None:
    budget = getattr(getattr(worker.model_runner, "speculator", None), "budget", None)
    if budget is None:
        return
    learned = budget.budget
    vars(learned).pop("plan", None)
    if fixed:
        # What costs nothing is drafted in full.
        learned.plan = lambda *_: Plan(np.zeros(1), learned.everything, gained=1.0)
