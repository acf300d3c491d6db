"""Runs of `vllm-hsd bench`: engines that alternate over the same prompts.

The configurations alternate prompt by prompt in an order that rotates, and never run at the same
time, so that what slows the machine down slows all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, Self

from vllm_hsd.errors import UserError
from vllm_hsd.host.request_keys import KEYS
from vllm_hsd.tools.cli import bench_quality, greedy
from vllm_hsd.tools.cli.bench_jobs import Comparison, Job, Results, Setup
from vllm_hsd.tools.cli.options import progress
from vllm_hsd.tools.engine import MAX_CPU_CACHE, EngineProcess
from vllm_hsd.tools.machine_load import CpuTimes
from vllm_hsd.tools.worker_process import LOGS

# Room between the longest output and the engine's longest context: near it, drafters stop, and a
# branch needs whole blocks of the KV cache (128 tokens on a CPU).
SPARE_TOKENS = 1024
# A drafting engine needs more memory than the plain one, whose size is known when it has loaded.
DRAFTER_MEMORY = 1.2


class Engines:
    """Engine processes by configuration, of which one at most is at work.

    All stay loaded where memory allows; otherwise starting one ends the others.

    Attributes:
        measures_memory: whether the first engine tells if all fit; else whoever starts them knows.
    """

    measures_memory = True

    def __init__(self, comparison: Comparison, setup: Setup) -> None:
        self._comparison, self._setup = comparison, setup
        self._running: dict[int, EngineProcess] = {}
        self.cores: list[int] = []
        self._on_host = setup.device == "cpu"
        self._count = count = self.count(comparison)
        self._args = engine_arguments(comparison, setup, count)
        # On an accelerator every engine takes its share of the memory in advance.
        share_asked = self._args.get("gpu_memory_utilization", 1.0)
        self.stay_loaded = self._on_host or share_asked * count <= 1

    def count(self, comparison: Comparison) -> int:
        """Engines that are loaded together."""
        return len(comparison.configs)

    def get(self, index: int) -> EngineProcess:
        """The engine of a configuration, loaded and warm."""
        if index in self._running:
            return self._running[index]
        if not self.stay_loaded:
            self.close()
        comparison, config = self._comparison, self._comparison.configs[index]
        name = comparison.names[index]
        progress(f"loading: {name}")
        engine = EngineProcess(
            self._args | ({"speculative_config": config} if config is not None else {}),
            f"'{name}'",
            log=comparison.output / LOGS / f"{index}.log",
        )
        self._running[index] = engine.__enter__()
        self.cores = engine.call(bench_quality.pin) if self._on_host else []
        # The first batch of an engine is slower than all later ones.
        warm_up = {"max_tokens": min(comparison.max_tokens, 16), "ignore_eos": True}
        engine.generate([self._setup.prompt_ids[0]] * max(comparison.batch_sizes), warm_up)
        if index == 0 and self._on_host and self.measures_memory:
            rest = (self._count - 1) * DRAFTER_MEMORY + 1
            self.stay_loaded = rest * engine.memory_bytes() < self._setup.available_memory
            if not self.stay_loaded:
                progress("too little memory for all engines at once: they load again every round")
        return engine

    def close(self, index: int | None = None, at_once: bool = False) -> None:
        """End one engine, or all."""
        for number in [index] if index is not None else list(self._running):
            if number in self._running:
                self._running.pop(number).close(at_once)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(at_once=exception[0] is not None)


def engine_arguments(comparison: Comparison, setup: Setup, count: int) -> dict[str, Any]:
    """Arguments of each of `count` engines that are loaded together, without speculation.

    Raises:
        UserError: each of several is to take a share of the host's memory.
    """
    longest = max(map(len, setup.prompt_ids)) + comparison.max_tokens + SPARE_TOKENS
    found = {"max_model_len": min(longest, setup.max_model_len), **comparison.base_args}
    if setup.device == "cpu" and "gpu_memory_utilization" not in found:
        # vLLM's default is nearly all memory, which leaves no room for a second engine.
        share = min(MAX_CPU_CACHE, setup.available_memory // (4 * count))
        found = {"kv_cache_memory_bytes": share, **found}
    elif setup.device == "cpu" and count > 1:
        raise UserError(
            "--engine-args has gpu_memory_utilization, which every engine would take of the same "
            "memory: give kv_cache_memory_bytes."
        )
    return found


def measure(results: Results, setup: Setup) -> None:
    """Run all jobs; a configuration that fails takes no further part.

    Raises:
        UserError: no speculation, which all others are compared with, cannot run.
    """
    comparison = results.comparison
    with Engines(comparison, setup) as engines:
        engines.get(0)
        every = (
            job
            for round_ in range(comparison.rounds)
            for job in jobs(comparison, round_, engines.stay_loaded)
        )
        total = comparison.rounds * len(list(jobs(comparison, 0, True)))
        for done, job in enumerate(every, 1):
            if job.config in results.errors:
                continue
            name = comparison.names[job.config]
            prompts = [setup.prompt_ids[i % len(setup.prompt_ids)] for i in job.prompts]
            try:
                engine, before = engines.get(job.config), CpuTimes.now()
                found = engine.generate(prompts, sampling_params(comparison, setup, job))
            except UserError as error:
                if job.config == 0:
                    raise
                results.errors[job.config] = str(error)
                engines.close(job.config)
                progress(f"could not run: {error}")
                continue
            bench_quality.record(results, job, found, before)
            progress(
                f"[{done}/{total}] round {job.round + 1}, batch size {job.batch_size}, temperature "
                f"{job.temperature:g}, {name}: {found.num_tokens / found.seconds:.1f} tokens/s"
            )
        compare_greedy(results, setup, engines)
        results.metadata |= {
            "pinned_to_cores": engines.cores,
            **bench_quality.summary(results).model_dump(),
        }
        if sys.stderr.isatty():
            print(file=sys.stderr)


def sampling_params(comparison: Comparison, setup: Setup, job: Job) -> list[dict[str, Any]]:
    """Arguments of `vllm.SamplingParams` for each prompt of a job.

    An answer that follows a grammar ends with it. Keys of a request that the configuration does not
    know are left out.
    """
    found = []
    for prompt in job.prompts:
        own = dict(comparison.sampling_of(prompt))
        if "extra_args" in own:
            unknown = KEYS - setup.request_keys[job.config]
            own["extra_args"] = {k: v for k, v in own["extra_args"].items() if k not in unknown}
        # Without seeds, as most requests come: a seed would couple drafts and target.
        found.append(
            {
                "max_tokens": comparison.max_tokens,
                "ignore_eos": "structured_outputs" not in own,
                "temperature": job.temperature,
                **own,
            }
        )
    return found


def compare_greedy(results: Results, setup: Setup, engines: Engines) -> None:
    """Find greedy outputs that differ, and in 16 bits by how little the target prefers its own."""
    found = greedy.differences(results, setup.prompt_ids)
    if found and setup.dtype in greedy.LARGEST_GAP:
        progress(f"looking at the target's logits at {len(found)} greedy differences")
        asked = [results.comparison.sampling_of(d.job.prompts[d.sequence]) for d in found]
        # A grammar forbade tokens of these answers.
        masked = [d for d, own in zip(found, asked, strict=True) if "structured_outputs" in own]
        gaps = partial(engines.get(0).call, greedy.gaps_of_target)
        found = greedy.with_gaps(gaps, [each for each in found if each not in masked])
        found += greedy.with_gaps(partial(gaps, alone=True), masked)
    results.differences = found


def jobs(comparison: Comparison, round_: int, alternate: bool) -> Iterator[Job]:
    """The jobs of a round; the engine changes with every batch (`alternate`), else once a round."""
    parts = [
        (batch_size, temperature, part, prompts)
        for batch_size in comparison.batch_sizes
        for temperature in comparison.temperatures
        for part, prompts in enumerate(comparison.prompt_batches(batch_size))
    ]
    count = len(comparison.configs)
    # Rotate the order, so that no configuration always runs first or after the same one.
    if alternate:
        for number, part in enumerate(parts):
            for shift in range(count):
                yield Job((round_ + number + shift) % count, round_, *part)
    else:
        for shift in range(count):
            for part in parts:
                yield Job((round_ + shift) % count, round_, *part)
