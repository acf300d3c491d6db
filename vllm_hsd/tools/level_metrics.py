"""What the metrics of a process say of its levels; see `host.metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_hsd.host.metrics import COUNTERS, SOURCE_COUNTERS, counters


def level_counts() -> list[dict[str, float]]:
    """Counters of this process, one mapping per level, summed over engines.

    Empty before the first step, and when vLLM runs with statistics switched off.
    """
    found = _totals("level")
    return [found[level] for level in sorted(found, key=int)]


def source_counts() -> dict[str, dict[str, float]]:
    """Counters of this process by source of the lowest level, forced tokens too, where it has some.

    As those of `level_counts`, with the keys of SOURCE_COUNTERS.
    """
    return _totals("source")


def counted_since(before: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """What `level_counts` has gained since it was `before`, which may have had fewer levels."""
    now = level_counts()
    earlier = [*before, *(dict.fromkeys(level, 0.0) for level in now[len(before) :])]
    return [
        {name: value - old[name] for name, value in level.items()}
        for level, old in zip(now, earlier, strict=True)
    ]


def sources_since(before: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """What `source_counts` has gained since it was `before`, which may have had fewer sources."""
    return {
        source: {name: value - before.get(source, {}).get(name, 0.0) for name, value in own.items()}
        for source, own in source_counts().items()
    }


def _totals(kind: str) -> dict[str, dict[str, float]]:
    """Counters of levels or of sources by its label and their names, summed over engines."""
    found: dict[str, dict[str, float]] = {}
    names = COUNTERS if kind == "level" else SOURCE_COUNTERS
    for name, counter in zip(names, counters(kind), strict=True):
        for sample in next(iter(counter.collect())).samples:
            if sample.name.endswith("_total"):
                own = found.setdefault(sample.labels[kind], dict.fromkeys(names, 0.0))
                own[name] += sample.value
    return found
