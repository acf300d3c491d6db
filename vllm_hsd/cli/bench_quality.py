"""How far the figures of `vllm-hsd bench` can be trusted: other work, drift, impossible ratios."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from vllm_hsd import host
from vllm_hsd.cli.bench_jobs import Job, Results
from vllm_hsd.engine import Generation

# Above these a figure is marked: cores that other processes used, share of time that the
# hypervisor took, difference between equal steps, and how far a ratio may exceed its bound.
OTHERS = 0.1
STEAL = 0.02
DRIFT = 0.10
TOLERANCE = 1.02


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of all cores since the machine started: at work, taken by its hypervisor, in all."""

    busy: float
    steal: float
    total: float

    @staticmethod
    def now() -> CpuTimes:
        """As of this moment."""
        times = psutil.cpu_times()
        steal = getattr(times, "steal", 0.0)
        # Linux counts a guest's time in user and nice, too.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle = times.idle + getattr(times, "iowait", 0.0)
        return CpuTimes(total - idle - steal, steal, total)

    def others(self, before: CpuTimes, generation: Generation) -> float:
        """Cores that processes other than the engine used while it generated."""
        return max(0.0, (self.busy - before.busy - generation.cpu_seconds) / generation.seconds)

    def stolen(self, before: CpuTimes) -> float:
        """Share of the time between both that the hypervisor gave to other machines."""
        return (self.steal - before.steal) / max(self.total - before.total, 1e-9)


def record(results: Results, job: Job, found: Generation, before: CpuTimes) -> None:
    """Keep a job's output and what else the machine did meanwhile."""
    now = CpuTimes.now()
    results.generations[job] = found
    results.loads[job] = now.others(before, found), now.stolen(before)


def pin(llm: Any) -> list[int]:
    """Pin all threads of an engine's process to as many cores as it computes with; returns them.

    All engines of a comparison take the same cores, in turn. Where the system has no affinities,
    nothing is pinned and the list is empty.
    """
    import torch

    if not hasattr(os, "sched_setaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))[-torch.get_num_threads() :]
    for thread in psutil.Process().threads():
        os.sched_setaffinity(thread.id, cores)
    return cores


def time_per_output_token(generations: Sequence[Generation]) -> float | None:
    """Median over requests of the milliseconds per token after the first."""
    times = [
        1e3 * (last - first) / (len(ids) - 1)
        for each in generations
        for first, last, ids in zip(
            each.first_token_seconds, each.last_token_seconds, each.token_ids, strict=True
        )
        if len(ids) > 1
    ]
    return statistics.median(times) if times else None


def exceeds_tokens_per_step(row: dict[str, Any]) -> bool:
    """Whether a speed-up is more than its tokens per step can give: drafts make no step cheaper."""
    speedup, tokens = row["speedup"], row["tokens_per_step"]
    return bool(speedup and tokens and speedup > TOLERANCE * tokens)


def summary(results: Results) -> dict[str, float | None]:
    """Figures of all runs, for bench.json; None where nothing was measured.

    `other_cores` and `steal` are medians over jobs. `drift` is the largest difference between equal
    steps: the median over batches of prompts of (slowest - fastest) / fastest time per token after
    the first, over rounds without speculation.
    """
    times = defaultdict(list)
    for job, generation in results.generations.items():
        if job.config == 0 and (milliseconds := time_per_output_token([generation])):
            times[job.batch_size, job.temperature, job.part].append(milliseconds)
    ratios = [max(same) / min(same) - 1 for same in times.values() if len(same) > 1]
    loads = results.loads.values()
    return {
        "other_cores": round(statistics.median(x for x, _ in loads), 3) if loads else None,
        "steal": round(statistics.median(x for _, x in loads), 4) if loads else None,
        "drift": round(statistics.median(ratios), 4) if ratios else None,
    }


def sentences(results: Results, rows: Sequence[dict[str, Any]]) -> list[str]:
    """What makes the figures less trustworthy than they look, a sentence each."""
    found = summary(results)
    notes = []
    if results.metadata["on_host"] and (found["other_cores"] or 0) > OTHERS:
        notes.append(
            f"other processes used {found['other_cores']:.1f} of {host.cores()} cores meanwhile: "
            "measure again on a quiet machine."
        )
    if (found["steal"] or 0) > STEAL:
        notes.append(
            f"the hypervisor took {found['steal']:.0%} of the processor time (steal): other "
            "machines on this host slowed all runs."
        )
    if (found["drift"] or 0) > DRIFT:
        notes.append(
            f"equal steps without speculation differ by {found['drift']:.0%} between rounds: "
            "ratios below that are noise."
        )
    if any(exceeds_tokens_per_step(row) for row in rows):
        notes.append(
            "a speed-up marked ! exceeds its tokens per step, which no speculation can give: it "
            "was measured on a disturbed machine."
        )
    return notes
