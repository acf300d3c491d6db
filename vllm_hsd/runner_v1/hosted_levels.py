"""The levels of a cascade on the V1 runner, from their configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig

from vllm_hsd.core.levels import LevelOptions, Sources
from vllm_hsd.errors import quoted
from vllm_hsd.levels import LevelConfig
from vllm_hsd.levels.base import Place


@dataclass(frozen=True)
class HostedLevel:
    """A level that a V1 runner hosts.

    Attributes:
        config: the user's keys.
        options: how it takes part in the cascade.
        level: what the cascade drafts with: a level or `Sources`.
        model: its model, which may be the last of several sources; None for lookups alone.
        loads: vLLM's configuration of that model if it is loaded, else None.
        named: what messages call the model, "levels[i].model 'path'".
    """

    config: LevelConfig
    options: LevelOptions
    level: Any
    model: Any
    loads: Any
    named: str


def build_levels(vllm_config: VllmConfig, runner: Any) -> list[HostedLevel]:
    """The levels that a configuration describes, not yet loaded.

    Args:
        vllm_config: the target's configuration.
        runner: the V1 runner that hosts the target.
    """
    speculative: Any = vllm_config.speculative_config
    hsd, hosted = speculative.hsd, []
    for i, (config, options) in enumerate(zip(hsd.levels, hsd.options(), strict=True)):
        loads = speculative.level_configs[i]
        longest = loads.draft_model_config if loads else vllm_config.model_config
        level = config.build_v1(Place(runner, vllm_config, i, longest.max_model_len))
        if hsd.adaptive and i == 0 and not (isinstance(level, Sources) or hsd.horizontal_tokens):
            # The one source of a level that may choose not to draft.
            sources = ([level], None) if config.is_lookup else ([], level)
            level = Sources([config.kind], *sources)
        model = level.drafter if isinstance(level, Sources) else level
        name, source = config.named_sources(f"levels[{i}]")[-1]
        named = f"{name}.{source.kind}"
        if loads is not None:
            named += f" {quoted(loads.model)}"
        hosted.append(HostedLevel(config, options, level, model, loads, named))
    return hosted
