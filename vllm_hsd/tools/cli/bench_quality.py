"""How far the figures of `vllm-hsd bench` can be trusted: other work, drift, impossible ratios."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import psutil

from vllm_hsd.tools.cli.bench_jobs import Job, Results
from vllm_hsd.tools.engine import Generation
from vllm_hsd.tools.machine_load import CpuTimes, MachineLoad

# How far a ratio may exceed its bound.
TOLERANCE = 1.02


def record(results: Results, job: Job, found: Generation, before: CpuTimes) -> None:
    """Keep a job's output and what else the machine did meanwhile."""
    results.generations[job] = found
    results.loads[job] = before.load_until_now(found.seconds, found.cpu_seconds)


def pin(llm: Any) -> list[int]:
    """Pin all threads of an engine's process to as many cores as it computes with; returns them.

    All engines of a comparison take the same cores, in turn. Where the system has no affinities, or
    vLLM chooses the cores of several ranks, nothing is pinned and the list is empty.
    """
    import torch

    ranks = llm.llm_engine.vllm_config.parallel_config.world_size
    if not hasattr(os, "sched_setaffinity") or ranks > 1:
        return []
    cores = sorted(os.sched_getaffinity(0))[-torch.get_num_threads() :]
    for thread in psutil.Process().threads():
        os.sched_setaffinity(thread.id, cores)
    return cores


def times_per_output_token(generations: Sequence[Generation]) -> list[float]:
    """Milliseconds per token after the first, of each request with two or more."""
    return [
        1e3 * (last - first) / (len(ids) - 1)
        for each in generations
        for first, last, ids in zip(
            each.first_token_seconds, each.last_token_seconds, each.token_ids, strict=True
        )
        if len(ids) > 1
    ]


def time_per_output_token(generations: Sequence[Generation]) -> float | None:
    """Median over requests of the milliseconds per token after the first."""
    times = times_per_output_token(generations)
    return statistics.median(times) if times else None


def exceeds_tokens_per_step(row: dict[str, Any]) -> bool:
    """Whether a speed-up is more than its tokens per step can give: drafts make no step cheaper."""
    speedup, tokens = row["speedup"], row["tokens_per_step"]
    return bool(speedup and tokens and speedup > TOLERANCE * tokens)


def summary(results: Results) -> MachineLoad:
    """Figures of all runs, for bench.json.

    Medians over jobs; the drift is that over batches of prompts of the times per token after the
    first, over rounds without speculation.
    """
    times = defaultdict(list)
    for job, generation in results.generations.items():
        if job.config == 0 and (milliseconds := time_per_output_token([generation])):
            times[job.batch_size, job.temperature, job.part].append(milliseconds)
    return MachineLoad.of(results.loads.values(), times.values())


def sentences(results: Results, rows: Sequence[dict[str, Any]]) -> list[str]:
    """What makes the figures less trustworthy than they look, a sentence each."""
    notes = summary(results).sentences(results.metadata["on_host"])
    if any(exceeds_tokens_per_step(row) for row in rows):
        notes.append(
            "a speed-up marked ! exceeds its tokens per step: the machine was disturbed, or a pass "
            "over one token takes longer here than one over a few, as on some CPUs."
        )
    return notes
