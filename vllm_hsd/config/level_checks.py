"""Checks of a cascade as a whole against its target and engine; each level checks itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from vllm_hsd.config import platform
from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.config.sizes import learns_one_length, schedule_of
from vllm_hsd.errors import UserError, collected, quoted
from vllm_hsd.levels import KINDS, LevelConfig, Target
from vllm_hsd.rules import MAX_KERNEL_NODES

# Recurrent layers that vLLM's runner tells how many tokens were accepted.
STATES_PER_DRAFT = ("MAMBA2", "SHORT_CONV", "GDN_ATTN")
# Its embeddings follow the tokens before, rejected ones included (0.32).
_KEEPS_REJECTED = "LongcatFlashNgramForCausalLM"


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
    mistakes += state_mistakes(hsd, target.model_config)
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
    if _KEEPS_REJECTED in model_config.architectures:
        yield (
            f"the target {quoted(model_config.model)} reads, in vLLM, rejected tokens as if they "
            "were text: remove speculative_config."
        )
    if parallel_config.decode_context_parallel_size > 1:
        yield "method 'hsd' does not run with decode_context_parallel_size above 1: set it to 1."


def engine_mistakes(hsd: CascadeConfig, arguments: EngineArgs) -> Iterator[str]:
    """A sentence for every level that does not work with other arguments of the engine."""
    for i, level in enumerate(hsd.levels):
        source = level.drafters[-1]
        if arguments.enable_lora and source.runs_target:
            yield (
                f"levels[{i}].{source.kind} runs layers of the target, which does not work with "
                "LoRA adapters: remove the level or enable_lora."
            )
    # vLLM drops the lengths by batch size that carry it: ranks may choose different ones.
    if hsd.is_stock and hsd.disable_by_batch_size and arguments.data_parallel_size > 1:
        yield (
            "disable_by_batch_size does not run data-parallel where vLLM's own drafter serves "
            "levels[0]: remove it, or set data_parallel_size to 1."
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


def lost_state(target: ModelConfig) -> str | None:
    """A sentence where no draft of a target can be rejected, whatever drafts."""
    # Layers for CPUs ignore how many tokens were accepted (0.32), under any method.
    if not current_platform.is_cpu() or not (target.is_hybrid or target.is_attention_free):
        return None
    return (
        f"the target {quoted(target.model)} keeps recurrent state, of which vLLM on a CPU loses "
        "what rejected tokens have overwritten: remove speculative_config."
    )


def state_mistakes(hsd: CascadeConfig, target: ModelConfig) -> Iterator[str]:
    """A sentence for all that does not go with recurrent state, such as Mamba's, of the target."""
    name = quoted(target.model)
    if not (target.is_hybrid or target.is_attention_free):
        if hsd.untested:
            yield f"untested has no meaning on {name}, which keeps no recurrent state: remove it."
        return
    if (mistake := lost_state(target)) is not None:
        yield mistake
        return
    if not hsd.untested:
        yield (
            f"method 'hsd' was never tested on a target that keeps recurrent state, as {name} "
            "does: use an attention-only target, one of vLLM's own methods, or set untested to "
            "true."
        )
    for i, level in enumerate(hsd.levels):
        for key, source in level.named_sources(f"levels[{i}]"):
            if source.runs_target or source.reads_target_states:
                yield (
                    f"{key}.{source.kind} does not run on a target that keeps recurrent state, as "
                    f"{name} does: use lookups or models."
                )
    if hsd.branches > 1:
        yield (
            f"levels[0].branches would share the one recurrent state that the target {name} keeps "
            "for a request: set it to 1."
        )


def check_states(kv_cache_config: KVCacheConfig) -> None:
    """Check that vLLM keeps a state for every draft token of the target.

    Raises:
        UserError: the target has recurrent layers whose rejected tokens stay in the state.
    """
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, MambaSpec) and spec.mamba_type.name not in STATES_PER_DRAFT:
            raise UserError(
                f"method 'hsd' does not run on the target's layers of vLLM's kind "
                f"{spec.mamba_type.name}, whose recurrent state keeps rejected tokens: remove "
                "speculative_config."
            )


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


def check_serving(hsd: CascadeConfig, parallel_config: ParallelConfig) -> None:
    """Check what the cascade asks of the runner.

    Raises:
        UserError: names the key.
    """
    launcher = parallel_config.distributed_executor_backend
    if learns_one_length(hsd) and launcher == "external_launcher":
        raise UserError(
            "adaptive does not run with external_launcher, where every rank schedules by its own "
            "clock: remove adaptive."
        )
    for i, level in enumerate(hsd.levels):
        for name, source in level.named_sources(f"levels[{i}]"):
            if not source.drafts_by and not hsd.is_stock:
                known = ", ".join(kind for kind, cls in KINDS.items() if cls.drafts_by)
                raise UserError(
                    f"{name}.{source.kind} drafts in the only level, alone or after lookups; "
                    f"other levels may be of the kinds {known}: keep it there."
                )
    if hsd.adaptive and hsd.scales_differ and platform.read_on_host():
        raise UserError(
            "adaptive lets a level pass on what another one has drawn, which needs the same "
            "temperature_scale at all levels that draw: set them alike, or adaptive to false."
        )
    if hsd.adaptive and hsd.horizontal_tokens and platform.read_on_host():
        raise UserError(
            "horizontal_tokens follow a top level that drafts in every step, and 'adaptive' leaves "
            "levels out: remove one of them."
        )
    if hsd.several_drafts and not hsd.is_stock:
        _check_several_drafts(hsd)
    if hsd.is_stock:
        _check_stock(hsd)
    schedule_of(hsd)


def _check_several_drafts(hsd: CascadeConfig) -> None:
    """Check what kernels cannot do with several drafts of a model.

    Raises:
        UserError: names the key.
    """
    nodes, options = hsd.branches * hsd.num_speculative_tokens, hsd.options()[0]
    if nodes > MAX_KERNEL_NODES:
        raise UserError(
            f"levels[0].branches and num_speculative_tokens make {nodes} draft tokens of a "
            f"request, but tree verification takes at most {MAX_KERNEL_NODES}: lower "
            "one of them."
        )
    for key, holds in {
        "verifier": hsd.verifier == "standard",
        "levels[0].stopping": options.stopping != "fixed",
    }.items():
        if holds:
            raise UserError(
                f"{key} does not go with levels[0].branches of a model, whose drafts are verified "
                "together by Traversal Verification: remove it."
            )


def _check_stock(hsd: CascadeConfig) -> None:
    """Check a cascade that vLLM's own drafter serves.

    Raises:
        UserError: it has a key that the drafter does not know.
    """
    name, source = hsd.levels[0].named_sources("levels[0]")[-1]
    for key, holds in {
        "adaptive": hsd.adaptive,
        "verifier": hsd.verifier not in ("block", "coupled"),
        f"{name}.temperature_scale": hsd.options()[0].temperature_scale != 1,
        f"{name}.stopping": hsd.options()[0].stopping != "fixed",
        f"{name}.max_model_len": getattr(source, "max_model_len", None) is not None,
    }.items():
        if holds:
            raise UserError(
                f"{key} has no meaning with {name}.{source.kind}, which vLLM's own drafter "
                "serves: remove it."
            )
