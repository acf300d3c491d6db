"""What a cascade's keys are where the user gives none: on a CPU, by what fits."""

from __future__ import annotations

from vllm.config.model import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from vllm_hsd.config import platform
from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.config.level_checks import connector_mistake
from vllm_hsd.levels.base import BRANCHES

logger = init_logger(f"vllm.{__name__}")


def with_defaults(hsd: CascadeConfig, target: ModelConfig, arguments: EngineArgs) -> CascadeConfig:
    """On a CPU, branches and adaptive drafting if they fit and the user does not decide."""
    if not platform.read_on_host():
        return hsd
    hsd = _with_branches(hsd, target, arguments)
    alone = hsd.is_stock and not hsd.has_model_next_to_lookups
    if "adaptive" in hsd.model_fields_set or alone:
        return hsd
    adaptive = hsd.model_copy(update={"adaptive": True})
    reasons = {
        "a level that verifies nothing": bool(hsd.interleaved),
        "a model with branches": hsd.several_drafts,
        "unequal temperature_scale": hsd.scales_differ,
        "horizontal_tokens": hsd.horizontal_tokens > 0,
        "enable_adaptive_verification": hsd.enable_adaptive_verification,
        "a KV connector": connector_mistake(adaptive, arguments) is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            logger.info("Drafts have fixed lengths: %s excludes 'adaptive'.", reason)
            return hsd
    return adaptive


def with_models_as_levels(hsd: CascadeConfig) -> CascadeConfig:
    """On a CPU, with `adaptive`, a model next to lookups as a level above them.

    Then the budget knows what each of them costs and gains. A model may verify the lookups' drafts
    too; a head cannot, see `CascadeConfig.verifying`.
    """
    if not (hsd.adaptive and platform.read_on_host() and hsd.has_model_next_to_lookups):
        return hsd
    lowest = hsd.levels[0]
    *lookups, last = lowest.drafters
    logger.info(
        "levels[0].sources[%d] is served as levels[1]: 'adaptive' weighs it against the lookups.",
        len(lookups),
    )
    found = lowest.model_copy(update={"sources": lookups})
    length = {"num_tokens": hsd.draft_lengths[0]}
    levels = [each.model_copy(update=length) for each in (found, last)]
    return hsd.model_copy(update={"levels": [*levels, *hsd.levels[1:]]})


def _with_branches(hsd: CascadeConfig, target: ModelConfig, arguments: EngineArgs) -> CascadeConfig:
    """Several drafts of a request for sources that are lookups, where that was measured."""
    level = hsd.levels[0]
    if len(hsd.levels) > 1 or level.kind != "sources" or "branches" in level.model_fields_set:
        return hsd
    # Attention has room for max_num_seqs rows.
    most = min(BRANCHES, arguments.max_num_seqs or BRANCHES)
    budget, row = arguments.max_num_batched_tokens, hsd.num_speculative_tokens + 1
    if budget is not None:
        most = min(most, budget // row)
    if arguments.enable_lora:
        # vLLM refuses a budget below the lists of all requests; what it is by default is not known.
        requests = arguments.max_num_seqs
        most = min(most, budget // (requests * row)) if budget and requests else 1
    found = level.model_copy(update={"branches": most})
    branching = hsd.model_copy(update={"levels": [found]})
    reasons = {
        "a source that is no lookup": not level.drafters[-1].is_lookup,
        "enable_adaptive_verification": hsd.enable_adaptive_verification,
        "multi-dimensional positions": target.uses_mrope,
        "an encoder": target.is_encoder_decoder,
        "kv_sharing_fast_prefill": arguments.kv_sharing_fast_prefill,
        "enable_return_routed_experts": arguments.aux_output_config.enabled,
        "a KV connector": connector_mistake(branching, arguments) is not None,
        "max_num_batched_tokens, max_num_seqs or enable_lora": most < 2,
    }
    for reason, holds in reasons.items():
        if holds:
            logger.info("A request has one draft: %s excludes 'branches'.", reason)
            return hsd
    return branching
