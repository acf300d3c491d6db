"""Checks of a cascade as a whole against its target and engine; each level checks itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_hsd.config import CascadeConfig
from vllm_hsd.errors import UserError, collected, quoted
from vllm_hsd.levels import LevelConfig, Target


def check_cascade(
    hsd: CascadeConfig, target: Target, arguments: EngineArgs, mistakes: list[str]
) -> list[SpeculativeConfig | None]:
    """Check the target, every level, and what they do together.

    Args:
        hsd: the cascade.
        target: the target.
        arguments: of the engine.
        mistakes: a sentence for each is added.

    Returns:
        vLLM's configuration of the model that each level loads; None where it loads none.
    """
    mistakes += target_mistakes(target.model_config, target.parallel_config)
    models: list[SpeculativeConfig | None] = []
    sound: list[LevelConfig | None] = []
    for i, (level, draft_length) in enumerate(zip(hsd.levels, hsd.draft_lengths, strict=True)):
        model, before = None, len(mistakes)
        for name, source in level.named_sources(f"levels[{i}]"):
            with collected(mistakes):
                # Only the last source can be a model.
                model = source.check(name, target, draft_length)
        models.append(model)
        sound.append(level if len(mistakes) == before else None)
    with collected(mistakes):
        check_exit_order(sound)
    mistakes += engine_mistakes(hsd, arguments)
    if target.model_config.uses_mrope:
        mistakes += position_mistakes(hsd, target.model_config.model)
    return models


def target_mistakes(model_config: ModelConfig, parallel_config: ParallelConfig) -> Iterator[str]:
    """Why the target cannot be served with a cascade: a sentence for each reason."""
    if parallel_config.pipeline_parallel_size > 1:
        yield (
            "method 'hsd' does not run with pipeline parallelism: set pipeline_parallel_size to 1."
        )
    if parallel_config.data_parallel_size > 1 and model_config.is_moe:
        yield (
            "method 'hsd' runs data-parallel with dense targets only, whose ranks do not wait for "
            f"each other: set data_parallel_size to 1 for {quoted(model_config.model)}."
        )
    if parallel_config.decode_context_parallel_size > 1:
        yield "method 'hsd' does not run with decode_context_parallel_size above 1: set it to 1."
    if model_config.is_hybrid or model_config.is_attention_free:
        yield (
            f"method 'hsd' was never tested on a target that keeps recurrent state, as "
            f"{quoted(model_config.model)} does: use an attention-only target, or one of vLLM's "
            "own methods."
        )


def engine_mistakes(hsd: CascadeConfig, arguments: EngineArgs) -> Iterator[str]:
    """A sentence for every level that does not work with other arguments of the engine."""
    for i, level in enumerate(hsd.levels):
        source = level.drafters[-1]
        if arguments.enable_lora and source.runs_target:
            yield (
                f"levels[{i}].{source.kind} runs layers of the target, which does not work with "
                "LoRA adapters: remove the level or enable_lora."
            )
    if mistake := connector_mistake(hsd, arguments):
        yield mistake


def position_mistakes(hsd: CascadeConfig, target: str) -> Iterator[str]:
    """A sentence for all that would compute multi-dimensional positions (M-RoPE) of the target."""
    needs = f"needs the multi-dimensional positions (M-RoPE) of the target {quoted(target)}"
    for i, level in enumerate(hsd.levels):
        for name, source in level.named_sources(f"levels[{i}]"):
            if source.runs_target or source.reads_target_states:
                yield f"{name}.{source.kind} {needs}: use lookups or models."
    if hsd.branches > 1:
        yield f"levels[0].branches {needs}: set it to 1."


def connector_mistake(hsd: CascadeConfig, arguments: EngineArgs) -> str | None:
    """A sentence if a KV connector would take caches that are not filled yet, or of branches."""
    # It takes what a step has computed, and such a level has not.
    keys = ("kv_transfer_config", "kv_offloading_size")
    used = [key for key in keys if getattr(arguments, key) is not None]
    late = [
        "adaptive" if hsd.adaptive else f"levels[{i}].sources"
        for i, level in enumerate(hsd.levels)
        if level.fills_cache_lazily or (hsd.adaptive and level.drafters[-1].keeps_cache)
    ]
    if used and hsd.branches > 1:
        return (
            "levels[0].branches are computed in blocks that a KV connector would take: remove "
            f"branches or {used[0]}."
        )
    if not used or not late:
        return None
    return (
        f"{late[0]} fills the cache of a model no sooner than the model drafts, too late for a "
        f"KV connector: remove {late[0]} or {used[0]}."
    )


def check_exit_order(levels: Sequence[LevelConfig | None]) -> None:
    """Check that every exit of the target runs more layers than the exits below it.

    Args:
        levels: of the cascade; None for one that is not looked at.

    Raises:
        UserError: names both levels.
    """
    exits = [
        (f"levels[{i}].{level.drafters[-1].kind}", layers)
        for i, level in enumerate(levels)
        # Only the last source of a level can be an exit.
        if level is not None and (layers := level.drafters[-1].target_layers) is not None
    ]
    for (lower, below), (upper, above) in itertools.pairwise(exits):
        if above <= below:
            raise UserError(
                f"{upper} runs {above} layers of the target and cannot improve on {lower}, which "
                f"runs {below}: order exits by depth, or keep one."
            )
