"""Counts per level, from the worker to vLLM's log line and to /metrics.

The worker attaches them to a step's output, the scheduler to the step's statistics, which vLLM
carries to the front end. vLLM's own `vllm:spec_decode_*` keep their meaning for the target.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields

import prometheus_client

from vllm_hsd.core.cascade import LevelStats

COUNTERS = {
    "drafted": "Tokens that a level offered to the next model up.",
    "accepted": "Tokens of a level that the next model up accepted.",
    "rounds": "Drafts that a level offered to the next model up.",
    "forwards": "Forward passes of a level.",
    "forward_seconds": "Seconds in forward passes of a level.",
}


@dataclass
class LevelTotals:
    """Counts per level summed over steps; index 0 is the cheapest level."""

    levels: list[LevelStats] = field(default_factory=list)

    def add(self, levels: list[LevelStats]) -> None:
        if not self.levels:
            self.levels = [LevelStats() for _ in levels]
        for total, level in zip(self.levels, levels, strict=True):
            for name in COUNTERS:
                setattr(total, name, getattr(total, name) + getattr(level, name))

    def line(self) -> str:
        """One line per level for the log."""
        parts = []
        for i, level in enumerate(self.levels):
            rate = level.accepted / level.drafted if level.drafted else float("nan")
            parts.append(
                f"level {i}: drafted {level.drafted}, accepted {level.accepted} ({rate:.1%}), "
                f"rounds {level.max_rounds}, forwards {level.forwards} "
                f"in {level.forward_seconds:.2f} s"
            )
        return "; ".join(parts)


_counters: dict[str, prometheus_client.Counter] = {}


def count(levels: list[LevelStats], engine: int) -> None:
    """Add one step's counts to the Prometheus counters `vllm_hsd:level_*`."""
    if not _counters:
        for name, text in COUNTERS.items():
            _counters[name] = prometheus_client.Counter(
                f"vllm_hsd:level_{name}", text, labelnames=["engine", "level"]
            )
    for i, level in enumerate(levels):
        for name, counter in _counters.items():
            counter.labels(str(engine), str(i)).inc(getattr(level, name))


def level_counts() -> list[dict[str, float]]:
    """The counters of this process, one mapping per level, summed over engines.

    Empty before the first step, and when vLLM runs with statistics switched off.
    """
    found: dict[int, dict[str, float]] = {}
    for name, counter in _counters.items():
        for sample in counter.collect()[0].samples:
            if sample.name.endswith("_total"):
                level = found.setdefault(int(sample.labels["level"]), dict.fromkeys(COUNTERS, 0.0))
                level[name] += sample.value
    return [found[i] for i in sorted(found)]


def install() -> None:
    """Hook vLLM's scheduler, its log line and its Prometheus logger (see compat.py)."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.spec_decode.metrics import (
        SpecDecodingLogging,
        SpecDecodingProm,
        SpecDecodingStats,
    )

    @dataclass
    class HsdSpecDecodingStats(SpecDecodingStats):
        """vLLM's statistics of a step's drafts with the counts of every level."""

        levels: list[LevelStats] = field(default_factory=list)

    # msgspec decodes by this annotation: without it the levels would be dropped on the way to
    # the front end.
    SchedulerStats.__annotations__["spec_decoding_stats"] = HsdSpecDecodingStats | None

    update_from_output, make_stats = Scheduler.update_from_output, Scheduler.make_stats

    @functools.wraps(update_from_output)
    def update_with_levels(self, scheduler_output, model_runner_output):
        levels = getattr(model_runner_output, "hsd_level_stats", None)
        if levels is not None:
            if not hasattr(self, "hsd_totals"):
                self.hsd_totals = LevelTotals()
            self.hsd_totals.add(levels)
        return update_from_output(self, scheduler_output, model_runner_output)

    @functools.wraps(make_stats)
    def make_stats_with_levels(self, spec_decoding_stats=None, *args, **kwargs):
        totals = getattr(self, "hsd_totals", None)
        if totals is not None and totals.levels and self.log_stats:
            stats = spec_decoding_stats or SpecDecodingStats.new(self.num_spec_tokens)
            values = {f.name: getattr(stats, f.name) for f in fields(SpecDecodingStats)}
            spec_decoding_stats = HsdSpecDecodingStats(**values, levels=totals.levels)
            totals.levels = []
        return make_stats(self, spec_decoding_stats, *args, **kwargs)

    Scheduler.update_from_output = update_with_levels
    Scheduler.make_stats = make_stats_with_levels
    _install_loggers(SpecDecodingLogging, SpecDecodingProm)


def _install_loggers(logging_class, prometheus_class) -> None:
    observe, log = logging_class.observe, logging_class.log
    observe_prometheus = prometheus_class.observe

    @functools.wraps(observe)
    def observe_levels(self, spec_decoding_stats):
        levels = getattr(spec_decoding_stats, "levels", [])
        if levels:
            if not hasattr(self, "hsd_totals"):
                self.hsd_totals = LevelTotals()
            self.hsd_totals.add(levels)
        if not levels or spec_decoding_stats.num_drafts:
            observe(self, spec_decoding_stats)

    @functools.wraps(log)
    def log_levels(self, log_fn=log.__defaults__[0]):
        log(self, log_fn)
        totals = getattr(self, "hsd_totals", None)
        if totals is not None and totals.levels:
            log_fn("Cascade metrics: %s", totals.line())
            totals.levels = []

    @functools.wraps(observe_prometheus)
    def observe_prometheus_levels(self, spec_decoding_stats, engine_idx=0):
        observe_prometheus(self, spec_decoding_stats, engine_idx)
        if levels := getattr(spec_decoding_stats, "levels", []):
            count(levels, engine_idx)

    logging_class.observe = observe_levels
    logging_class.log = log_levels
    prometheus_class.observe = observe_prometheus_levels
