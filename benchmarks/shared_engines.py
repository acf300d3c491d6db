"""Engines of a comparison that several of its cascades share: memory for all of them at once."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.tools.cli.bench_jobs import Comparison, Setup
from vllm_hsd.tools.cli.bench_runs import Engines
from vllm_hsd.tools.engine import EngineProcess


class SharedEngines(Engines):
    """One engine for cascades whose levels are among those of another: memory for all at once."""

    def __init__(self, comparison: Comparison, setup: Setup) -> None:
        self.hosts = hosts(comparison.configs)
        super().__init__(comparison, setup)

    def count(self, comparison: Comparison) -> int:
        """Engines that are loaded together: those that host others count once."""
        return len({host for host, _ in self.hosts.values()})

    def get(self, index: int) -> EngineProcess:
        """The engine that serves a configuration, with its levels selected."""
        host, places = self.hosts[index]
        engine = super().get(host)
        if places:
            cascade = CascadeConfig.parse(_keys(self._comparison.configs[index]))
            engine.select_levels(places, cascade.draft_lengths)
        return engine


def hosts(configs: list[dict[str, Any] | None]) -> dict[int, tuple[int, list[int]]]:
    """By configuration: the one whose engine serves it, and which of its levels it takes (none: all
    of an engine of its own)."""
    found: dict[int, tuple[int, list[int]]] = {}
    for index, config in enumerate(configs):
        found[index] = index, []
        if config is None or config.get("adaptive") is not False:
            continue
        for host in range(index + 1):
            if host == found[host][0] and (places := _places(config, configs[host])):
                found[index] = host, places
                break
    # Only an engine that others share has levels to select: it serves its own as it is.
    shared = Counter(host for host, _ in found.values())
    return {i: (host, places if shared[host] > 1 else []) for i, (host, places) in found.items()}


def _places(config: Mapping[str, Any], host: Mapping[str, Any] | None) -> list[int]:
    """Where the levels of a cascade are among those of another that could serve it."""
    if host is None or host.get("adaptive") is not False:
        return []
    theirs, mine = (CascadeConfig.parse(_keys(each)) for each in (host, config))
    places: list[int] = []
    for level, length in zip(mine.levels, mine.draft_lengths, strict=True):
        options = [
            place
            for place in range(places[-1] + 1 if places else 0, len(theirs.levels))
            if _alike(theirs.levels[place], level) and theirs.draft_lengths[place] >= length
        ]
        if not options:
            return []
        places.append(options[0])
    return places if theirs.verifier == mine.verifier else []


def _alike(one: Any, other: Any) -> bool:
    return bool(
        one.model_copy(update={"num_tokens": None}) == other.model_copy(update={"num_tokens": None})
    )


def _keys(config: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (config or {}).items() if key != "method"}
