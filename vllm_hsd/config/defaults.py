"""What a cascade's keys are where the user gives none: on a CPU, by what fits."""

from __future__ import annotations

from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from vllm_hsd.config import platform
from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.config.level_checks import connector_mistake

logger = init_logger(f"vllm.{__name__}")


def with_defaults(hsd: CascadeConfig, arguments: EngineArgs) -> CascadeConfig:
    """On a CPU, adaptive drafting if it fits and the user does not decide."""
    if not platform.read_on_host():
        return hsd
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
