"""Counts per level, from the worker to vLLM's log line and to /metrics.

The worker attaches them to a step's output (`ATTRIBUTE`), the scheduler to the step's statistics,
which vLLM carries to the front end. vLLM's own `vllm:spec_decode_*` keep their meaning for the
target.

vLLM's entry points `vllm.stat_logger_plugins` are not enough: only the asynchronous engine loads
them, and a logger only sees what vLLM's own statistics carry from the scheduler.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import prometheus_client
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm.v1.spec_decode.metrics import logger as vllm_logger

from vllm_hsd.cascade.counters import Count, LevelCounts
from vllm_hsd.host.forced_tokens import FORCED
from vllm_hsd.host.hooks import REGISTRY, SCHEDULER

logger = logging.getLogger(__name__)

# In the order of the columns of `LevelCounts.rows`.
COUNTERS = {
    "drafted": "Tokens that a level proposed to the next level or the target.",
    "accepted": "Tokens of a level that the next level or the target accepted.",
    "rounds": "Drafts that a level proposed to the next level or the target.",
    "forwards": "Forward passes of a level.",
    "forward_seconds": "Seconds in forward passes of a level; on CPU only, where they are exact.",
    "requested": "Drafts that the next level or the target could take from a level.",
    "empty": "Requested drafts that got no token: none was found, or none was worth it.",
    "seconds": "Seconds of a level: forward passes, lookups, verification; on CPU only.",
    "branches": "Branches of a level that were verified beside its drafts.",
    "branch_tokens": "Tokens of these branches that were verified for them alone.",
    "branches_followed": "Branches that the text followed further than the draft.",
    "followed_tokens": "Tokens that were emitted along branches.",
}
SOURCE_COUNTERS = {
    "drafted": "Tokens of one of a level's sources that the level proposed.",
    "accepted": "Tokens of one of a level's sources that were accepted.",
}

# Of a step's output: pickled to the scheduler with it, unknown to vLLM.
ATTRIBUTE = "hsd_level_counts"
# Of a scheduler: a function that is told of every step that has ended.
STEP_ENDED = "hsd_step_ended"

_METRICS = "vllm.v1.spec_decode.metrics"
_UNTIL = "vLLM carries a drafter's own statistics"
# Plugins may log what vLLM's statistics hold, in `AsyncLLM` only.
LOGGER_PLUGINS = "vllm-project/vllm#22456"


def log_line(counts: LevelCounts) -> str:
    """One part per level for the log, the first one with its sources."""
    sources = "".join(
        f", {name} {row[Count.accepted]} of {row[Count.drafted]}"
        for name, row in zip(counts.sources, counts.rows[counts.num_levels :], strict=True)
        if row.any()
    )
    return "; ".join(
        f"level {i}: {_described(row)}{'' if i else sources}"
        for i, row in enumerate(counts.rows[: counts.num_levels].tolist())
    )


def _described(row: list[int]) -> str:
    drafted, accepted, rounds, forwards, forward_ns, requested, empty, ns, *beside = row
    rate = accepted / drafted if drafted else float("nan")
    lengths = ""
    if requested:
        lengths = f"mean length {drafted / requested:.1f}, none for {empty / requested:.1%}, "
    return (
        f"drafted {drafted}, accepted {accepted} ({rate:.1%}), {lengths}"
        + (f"{ns / 1e9:.2f} s, " if ns else "")
        + f"rounds {rounds}, forwards {forwards}"
        + (f" in {forward_ns / 1e9:.2f} s" if forward_ns else "")
        + (f", branches {beside[0]} of {beside[1]} tokens, " if beside[0] else "")
        + (f"{beside[2]} followed by {beside[3]} tokens" if beside[0] else "")
    )


@functools.cache
def counters(kind: str) -> list[prometheus_client.Counter]:
    """Prometheus counters of levels or of sources, in the order of the columns."""
    texts = COUNTERS if kind == "level" else SOURCE_COUNTERS
    labels = ["engine", "level"] if kind == "level" else ["engine", "level", "source"]
    new = prometheus_client.Counter
    return [new(f"vllm_hsd:{kind}_{name}", text, labels) for name, text in texts.items()]


def count(counts: LevelCounts, engine: int) -> None:
    """Add one step's counts to the Prometheus counters `vllm_hsd:level_*`."""
    units = np.ones(counts.rows.shape[1])
    units[[Count.forward_ns, Count.ns]] = 1e9
    rows = (counts.rows / units).tolist()
    for i, row in enumerate(rows[: counts.num_levels]):
        for column, counter in enumerate(counters("level")):
            # The first columns are there from the first step, others once they count something.
            if row[column] or column <= Count.forwards:
                counter.labels(str(engine), str(i)).inc(row[column])
    for name, row in zip(counts.sources, rows[counts.num_levels :], strict=True):
        for key, counter in zip(SOURCE_COUNTERS, counters("source"), strict=True):
            # Not every server has a grammar.
            if name != FORCED or row[Count[key]]:
                counter.labels(str(engine), "0", name).inc(row[Count[key]])


@dataclass
class HsdSpecDecodingStats(SpecDecodingStats):
    """vLLM's statistics of a step's drafts with the counts of every level, see `LevelCounts`."""

    rows: list[list[int]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """As vLLM's; tokens of branches beside the longest draft have no places of their own."""
        in_places = min(num_draft_tokens, self.num_spec_tokens)
        super().observe_draft(in_places, num_accepted_tokens)
        self.num_draft_tokens += num_draft_tokens - in_places


@REGISTRY.changes(
    "vllm.v1.metrics.stats.SchedulerStats.__annotations__",
    why="carries the counts per level to the front end: msgspec decodes by the annotation",
    until=_UNTIL,
)
def widen_statistics() -> None:
    # msgspec reads annotations once, when a process makes its first engine.
    if hasattr(SchedulerStats, "__msgspec_cache__"):
        logger.warning(
            "Counts per level will be missing: this process has run an engine without a cascade."
        )
    SchedulerStats.__annotations__["spec_decoding_stats"] = HsdSpecDecodingStats | None


@REGISTRY.replaces(
    f"{SCHEDULER}.update_from_output",
    "self scheduler_output model_runner_output",
    why="keeps the counts per level of a step's output, and tells what learns from steps",
    until=_UNTIL,
)
def update_from_output(original, self, scheduler_output, model_runner_output):
    if (step_ended := getattr(self, STEP_ENDED, None)) is not None:
        step_ended(scheduler_output, model_runner_output)
    if (counts := getattr(model_runner_output, ATTRIBUTE, None)) is not None:
        _add(self, counts)
    return original(self, scheduler_output, model_runner_output)


@REGISTRY.replaces(
    f"{SCHEDULER}.make_stats",
    "self spec_decoding_stats kv_connector_stats cudagraph_stats perf_stats ec_connector_stats",
    why="adds the counts per level to the statistics of the step",
    until=_UNTIL,
)
def make_stats(original, self, spec_decoding_stats=None, *args, **kwargs):
    if self.log_stats and (counts := _take(self)) is not None:
        stats = spec_decoding_stats or SpecDecodingStats.new(places_of(self))
        values = {f.name: getattr(stats, f.name) for f in fields(SpecDecodingStats)}
        spec_decoding_stats = HsdSpecDecodingStats(
            **values, rows=counts.rows.tolist(), sources=counts.sources
        )
    return original(self, spec_decoding_stats, *args, **kwargs)


@REGISTRY.replaces(
    f"{_METRICS}.SpecDecodingLogging.observe",
    "self spec_decoding_stats",
    why="gathers the counts per level for the log line",
    until=_UNTIL,
    issue=LOGGER_PLUGINS,
)
def observe(original, self, spec_decoding_stats):
    if (counts := _counts_of(spec_decoding_stats)) is not None:
        _add(self, counts)
    if counts is None or spec_decoding_stats.num_drafts:
        original(self, spec_decoding_stats)


@REGISTRY.replaces(
    f"{_METRICS}.SpecDecodingLogging.log",
    "self log_fn",
    why="prints the counts per level after vLLM's own line",
    until=_UNTIL,
    issue=LOGGER_PLUGINS,
)
def log(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    if (counts := _take(self)) is not None:
        log_fn = kwargs.get("log_fn", args[0] if args else vllm_logger.info)
        log_fn("Cascade metrics: %s", log_line(counts))


@REGISTRY.replaces(
    f"{_METRICS}.SpecDecodingProm.observe",
    "self spec_decoding_stats engine_idx",
    why="counts per level for /metrics",
    until=_UNTIL,
    issue=LOGGER_PLUGINS,
)
def observe_prometheus(original, self, spec_decoding_stats, engine_idx=0):
    original(self, spec_decoding_stats, engine_idx)
    if (counts := _counts_of(spec_decoding_stats)) is not None:
        count(counts, engine_idx)


def places_of(owner: Any) -> int:
    """The longest draft of a request, of a scheduler of vLLM.

    vLLM's own number is that of the tokens it schedules, branches included.
    """
    hsd = getattr(owner.vllm_config.speculative_config, "hsd", None)
    return int(owner.num_spec_tokens if hsd is None else hsd.num_speculative_tokens)


@REGISTRY.replaces(
    f"{SCHEDULER}.make_spec_decoding_stats",
    (
        "self spec_decoding_stats num_draft_tokens num_accepted_tokens "
        "num_invalid_spec_tokens request_id"
    ),
    why="counts accepted tokens by their place in a draft, not among all branches",
    until="vLLM verifies trees",
)
def make_spec_decoding_stats(original, self, spec_decoding_stats, *args, **kwargs):
    if spec_decoding_stats is None:
        spec_decoding_stats = HsdSpecDecodingStats.new(places_of(self))
    return original(self, spec_decoding_stats, *args, **kwargs)


@REGISTRY.replaces(
    f"{SCHEDULER}.add_request",
    "self request",
    why="sizes the histogram of a request by the longest draft, not by all branches",
    until="vLLM verifies trees",
)
def add_request(original, self, request):
    original(self, request)
    if request.spec_decode_metrics is not None:
        request.spec_decode_metrics = RequestSpecDecodeMetrics.new(places_of(self))


@REGISTRY.replaces(
    f"{_METRICS}.SpecDecodingProm.__init__",
    "self speculative_config labelnames per_engine_labelvalues is_diffusion",
    why="names the places of the longest draft in /metrics, not those of all branches",
    until="vLLM verifies trees",
)
def init_prometheus(original, self, speculative_config, *args, **kwargs):
    if (hsd := getattr(speculative_config, "hsd", None)) is not None:
        # vLLM reads nothing else of it.
        speculative_config = SimpleNamespace(num_speculative_tokens=hsd.num_speculative_tokens)
    original(self, speculative_config, *args, **kwargs)


def _counts_of(stats: SpecDecodingStats) -> LevelCounts | None:
    rows = getattr(stats, "rows", [])
    return LevelCounts(np.array(rows, np.int64), stats.sources) if rows else None  # type: ignore[attr-defined]


def _add(owner: Any, counts: LevelCounts) -> None:
    """Add to the totals of a scheduler or logger of vLLM, which live as long as it."""
    total = getattr(owner, "hsd_totals", None)
    rows = counts.rows if total is None else total.rows + counts.rows
    owner.hsd_totals = LevelCounts(rows, counts.sources)


def _take(owner: Any) -> LevelCounts | None:
    """The totals since the last call, None where nothing was added."""
    taken, owner.hsd_totals = getattr(owner, "hsd_totals", None), None
    return taken
