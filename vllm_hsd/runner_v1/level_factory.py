"""Levels of a cascade on the V1 runner, by their configuration."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig

from vllm_hsd.core.bigram import BigramLevel, read_bigram
from vllm_hsd.core.exit_head import read_exit_head
from vllm_hsd.core.levels import FirstOf, LookupLevel
from vllm_hsd.core.ngram_model import NgramModelLevel
from vllm_hsd.core.suffix import SuffixLevel
from vllm_hsd.core.suffix_store import read_store
from vllm_hsd.level_config import (
    BigramLevelConfig,
    Eagle3LevelConfig,
    EarlyExitLevelConfig,
    ExitHeadLevelConfig,
    FirstOfLevelConfig,
    LevelConfig,
    NgramLevelConfig,
    NgramModelLevelConfig,
    SuffixLevelConfig,
    source_names,
)
from vllm_hsd.runner_v1.eagle3 import Eagle3Level
from vllm_hsd.runner_v1.levels import (
    EarlyExitLevel,
    ExitHeadLevel,
    ModelLevel,
    NgramLevel,
)


def build_level(
    level: LevelConfig, runner, vllm_config: VllmConfig, index: int, context_length: int
):
    """The level that a configuration describes, not yet loaded.

    Args:
        level: the user's keys.
        runner: the V1 runner that hosts the target.
        vllm_config: the target's configuration.
        index: position in the cascade.
        context_length: of a level that is a model of its own.
    """
    if isinstance(level, EarlyExitLevelConfig):
        return EarlyExitLevel(runner, vllm_config, index, level.early_exit)
    if isinstance(level, ExitHeadLevelConfig):
        return ExitHeadLevel(runner, vllm_config, index, read_exit_head(level.exit_head))
    if isinstance(level, BigramLevelConfig):
        return BigramLevel(read_bigram(level.bigram), runner.device)
    if isinstance(level, NgramModelLevelConfig):
        return NgramModelLevel(read_store(level.ngram_model, "ngram_model"), runner.device)
    if isinstance(level, SuffixLevelConfig):
        path = level.suffix.store
        store = None if path is None else read_store(path)
        return SuffixLevel(store, level.suffix.shared_tokens, level.suffix.min_acceptance)
    if isinstance(level, FirstOfLevelConfig):
        sources = [
            build_level(source, runner, vllm_config, index, context_length)
            for source in level.first_of
        ]
        return FirstOf(
            names=source_names(level),
            lookups=[source for source in sources if isinstance(source, LookupLevel)],
            drafter=None if isinstance(sources[-1], LookupLevel) else sources[-1],
            min_acceptance=level.min_acceptance,
        )
    if isinstance(level, NgramLevelConfig):
        return NgramLevel(level.ngram, vllm_config.model_config.max_model_len)
    if isinstance(level, Eagle3LevelConfig):
        return Eagle3Level(runner, vllm_config, index, context_length)
    return ModelLevel(runner, vllm_config, index, context_length)


def as_sources(level: Any, kind: str) -> Any:
    """A lowest level that may choose not to draft: a lookup, a head, an n-gram model as a source.

    Args:
        level: the lowest level of a cascade, from `build_level`.
        kind: the user's name for what it is.
    """
    if isinstance(level, LookupLevel):
        return FirstOf([kind], [level])
    if isinstance(level, Eagle3Level | NgramModelLevel):
        return FirstOf([kind], [], level)
    return level
