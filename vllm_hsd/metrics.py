"""Counts per level, from the worker to vLLM's log line and to /metrics.

The worker attaches them to a step's output (`ATTRIBUTE`), the scheduler to the step's statistics,
which vLLM carries to the front end, the same on both runners. vLLM's own `vllm:spec_decode_*` keep
their meaning for the target.

vLLM's entry points `vllm.stat_logger_plugins` are not enough: only the asynchronous engine loads
them, and a logger only sees what vLLM's own statistics carry from the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import prometheus_client
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_hsd.core.levels import LevelStats
from vllm_hsd.registry import NONE_FILED
from vllm_hsd.shared_hooks import REGISTRY

logger = logging.getLogger(__name__)

COUNTERS = {
    "drafted": "Tokens that a level proposed to the next level or the target.",
    "accepted": "Tokens of a level that the next level or the target accepted.",
    "rounds": "Drafts that a level proposed to the next level or the target.",
    "forwards": "Forward passes of a level.",
    "forward_seconds": "Seconds in forward passes of a level; on CPU only, where they are exact.",
    "requested": "Drafts that the next level or the target could take from a level.",
    "empty": "Requested drafts that got no token: none was found, or none was worth it.",
    "seconds": "Seconds of a level: forward passes, lookups, verification; on CPU only.",
    "sat_out": "Requests that a level drafted nothing for: states of the target were gone.",
}

SOURCE_COUNTERS = {
    "drafted": "Tokens of one of a level's sources that the level proposed.",
    "accepted": "Tokens of one of a level's sources that were accepted.",
}
# Counters that appear once they count something.
_OFTEN_ZERO = ("forward_seconds", "sat_out", "requested", "empty", "seconds")

# Of a step's output: pickled to the scheduler with it, unknown to vLLM.
ATTRIBUTE = "hsd_level_stats"
# Of a scheduler: a function that is told of every step that has ended.
STEP_ENDED = "hsd_step_ended"

_METRICS = "vllm.v1.spec_decode.metrics"
_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
_UNTIL = "vLLM carries a drafter's own statistics"
# Plugins may log what vLLM's statistics hold, in `AsyncLLM` only.
LOGGER_PLUGINS = "vllm-project/vllm#22456"


@dataclass
class LevelTotals:
    """Counts per level summed over steps; index 0 is the cheapest level."""

    levels: list[LevelStats] = field(default_factory=list)

    def add(self, levels: list[LevelStats]) -> None:
        if not self.levels:
            self.levels = [LevelStats() for _ in levels]
        self.levels = [a + b for a, b in zip(self.levels, levels, strict=True)]

    def take(self) -> list[LevelStats]:
        """Totals since the last call."""
        taken, self.levels = self.levels, []
        return taken


def log_line(levels: list[LevelStats]) -> str:
    """One part per level for the log."""
    return "; ".join(f"level {i}: {_described(level)}" for i, level in enumerate(levels))


def _described(level: LevelStats) -> str:
    rate = level.accepted / level.drafted if level.drafted else float("nan")
    seconds = f" in {level.forward_seconds:.2f} s" if level.forward_seconds else ""
    lengths = ""
    if level.requested:
        mean, empty = level.drafted / level.requested, level.empty / level.requested
        lengths = f"mean length {mean:.1f}, none for {empty:.1%}, "
    drafting = f"{level.seconds:.2f} s, " if level.seconds else ""
    sat_out = f", sat out {level.sat_out} requests" if level.sat_out else ""
    sources = "".join(
        f", {name} {source.accepted} of {source.drafted}" for name, source in level.sources.items()
    )
    return (
        f"drafted {level.drafted}, accepted {level.accepted} ({rate:.1%}), "
        f"{lengths}{drafting}"
        f"rounds {level.rounds}, forwards {level.forwards}{seconds}{sat_out}{sources}"
    )


_counters: dict[str, prometheus_client.Counter] = {}
_source_counters: dict[str, prometheus_client.Counter] = {}


def count(levels: list[LevelStats], engine: int) -> None:
    """Add one step's counts to the Prometheus counters `vllm_hsd:level_*`."""
    if not _counters:
        for name, text in COUNTERS.items():
            _counters[name] = prometheus_client.Counter(
                f"vllm_hsd:level_{name}", text, labelnames=["engine", "level"]
            )
        for name, text in SOURCE_COUNTERS.items():
            _source_counters[name] = prometheus_client.Counter(
                f"vllm_hsd:source_{name}", text, labelnames=["engine", "level", "source"]
            )
    for i, level in enumerate(levels):
        for name, counter in _counters.items():
            value = getattr(level, name)
            if value or name not in _OFTEN_ZERO:
                counter.labels(str(engine), str(i)).inc(value)
        for source, counts in level.sources.items():
            for name, counter in _source_counters.items():
                counter.labels(str(engine), str(i), source).inc(getattr(counts, name))


def level_counts() -> list[dict[str, float]]:
    """Counters of this process, one mapping per level, summed over engines.

    Empty before the first step, and when vLLM runs with statistics switched off.
    """
    found: dict[int, dict[str, float]] = {}
    for name, counter in _counters.items():
        for sample in next(iter(counter.collect())).samples:
            if sample.name.endswith("_total"):
                level = found.setdefault(int(sample.labels["level"]), dict.fromkeys(COUNTERS, 0.0))
                level[name] += sample.value
    return [found[i] for i in sorted(found)]


def counted_since(before: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """What `level_counts` has gained since it was `before`, which may have been empty."""
    now = level_counts()
    earlier = before or [dict.fromkeys(level, 0.0) for level in now]
    return [
        {name: value - old[name] for name, value in level.items()}
        for level, old in zip(now, earlier, strict=True)
    ]


@dataclass
class HsdSpecDecodingStats(SpecDecodingStats):
    """vLLM's statistics of a step's drafts with the counts of every level."""

    levels: list[LevelStats] = field(default_factory=list)


@REGISTRY.changes(
    "vllm.v1.metrics.stats.SchedulerStats.__annotations__",
    why="carries the counts per level to the front end: msgspec decodes by the annotation",
    until=_UNTIL,
    issue=NONE_FILED,
)
def widen_statistics() -> None:
    # msgspec reads annotations once, when a process makes its first engine.
    if hasattr(SchedulerStats, "__msgspec_cache__"):
        logger.warning(
            "Counts per level will be missing: this process has run an engine without a cascade."
        )
    SchedulerStats.__annotations__["spec_decoding_stats"] = HsdSpecDecodingStats | None


@REGISTRY.replaces(
    f"{_SCHEDULER}.update_from_output",
    ("self", "scheduler_output", "model_runner_output"),
    why="keeps the counts per level of a step's output, and tells what learns from steps",
    until=_UNTIL,
    issue=NONE_FILED,
)
def update_from_output(original, self, scheduler_output, model_runner_output):
    if (step_ended := getattr(self, STEP_ENDED, None)) is not None:
        step_ended(scheduler_output, model_runner_output)
    levels = getattr(model_runner_output, ATTRIBUTE, None)
    if levels is not None:
        _totals(self).add(levels)
    return original(self, scheduler_output, model_runner_output)


@REGISTRY.replaces(
    f"{_SCHEDULER}.make_stats",
    (
        "self",
        "spec_decoding_stats",
        "kv_connector_stats",
        "cudagraph_stats",
        "perf_stats",
        "ec_connector_stats",
    ),
    why="adds the counts per level to the statistics of the step",
    until=_UNTIL,
    issue=NONE_FILED,
)
def make_stats(original, self, spec_decoding_stats=None, *args, **kwargs):
    if self.log_stats and (levels := _totals(self).take()):
        stats = spec_decoding_stats or SpecDecodingStats.new(self.num_spec_tokens)
        values = {f.name: getattr(stats, f.name) for f in fields(SpecDecodingStats)}
        spec_decoding_stats = HsdSpecDecodingStats(**values, levels=levels)
    return original(self, spec_decoding_stats, *args, **kwargs)


@REGISTRY.replaces(
    f"{_METRICS}.SpecDecodingLogging.observe",
    ("self", "spec_decoding_stats"),
    why="gathers the counts per level for the log line",
    until=_UNTIL,
    issue=LOGGER_PLUGINS,
)
def observe(original, self, spec_decoding_stats):
    levels = getattr(spec_decoding_stats, "levels", [])
    if levels:
        _totals(self).add(levels)
    if not levels or spec_decoding_stats.num_drafts:
        original(self, spec_decoding_stats)


@REGISTRY.replaces(
    f"{_METRICS}.SpecDecodingLogging.log",
    ("self", "log_fn"),
    why="prints the counts per level after vLLM's own line",
    until=_UNTIL,
    issue=LOGGER_PLUGINS,
)
def log(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    if levels := _totals(self).take():
        log_fn = kwargs.get("log_fn", args[0] if args else _vllm_logger().info)
        log_fn("Cascade metrics: %s", log_line(levels))


@REGISTRY.replaces(
    f"{_METRICS}.SpecDecodingProm.observe",
    ("self", "spec_decoding_stats", "engine_idx"),
    why="counts per level for /metrics",
    until=_UNTIL,
    issue=LOGGER_PLUGINS,
)
def observe_prometheus(original, self, spec_decoding_stats, engine_idx=0):
    original(self, spec_decoding_stats, engine_idx)
    if levels := getattr(spec_decoding_stats, "levels", []):
        count(levels, engine_idx)


def _totals(owner) -> LevelTotals:
    """Totals that live as long as a scheduler or logger of vLLM."""
    if not hasattr(owner, "hsd_totals"):
        owner.hsd_totals = LevelTotals()
    return owner.hsd_totals


def _vllm_logger() -> logging.Logger:
    from vllm.v1.spec_decode import metrics

    return metrics.logger
