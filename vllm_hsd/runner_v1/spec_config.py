"""`SpeculativeConfig` for method "hsd" on the V1 runner."""

from __future__ import annotations

from typing import ClassVar

from vllm.config.utils import config
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_hsd.config import CascadeConfig
from vllm_hsd.draft_models import DraftConfig
from vllm_hsd.errors import UserError
from vllm_hsd.level_checks import connector_mistake
from vllm_hsd.shared_hooks import NeedsHooks
from vllm_hsd.spec_config import CascadeSpeculativeConfig
from vllm_hsd.stock_config import V1BlockVerificationConfig

logger = init_logger(f"vllm.{__name__}")
# Drafts of a request by several sources. Eight gave no more than four (docs/lab-notes.md).
DEFAULT_BRANCHES = 4


@config(repr=False)
class V1DraftConfig(DraftConfig):
    """Of one drafter; a head is loaded with this configuration in the cascade's place."""

    hsd_runner: ClassVar[str] = "V1"


@config(repr=False)
class V1CascadeConfig(NeedsHooks, CascadeSpeculativeConfig):
    """What vLLM carries around for a cascade on V1; build it with `create`."""

    hsd_runner: ClassVar[str] = "V1"
    hsd_method: ClassVar[str] = "hsd"
    draft_config_class: ClassVar[type[DraftConfig]] = V1DraftConfig

    @classmethod
    def create(
        cls, raw: dict, target_model_config, target_parallel_config, arguments: EngineArgs
    ) -> V1CascadeConfig | V1BlockVerificationConfig:
        """See `CascadeSpeculativeConfig.create`; MTP layers alone are vLLM's own drafter."""
        target = target_model_config, target_parallel_config
        cascade = super().create(raw, *target, arguments)
        if not cls.is_stock(cascade.hsd):
            return cascade
        return V1BlockVerificationConfig.create(cls.stock_keys(cascade.hsd), *target)

    @classmethod
    def with_defaults(
        cls, hsd: CascadeConfig, target_model_config, arguments: EngineArgs
    ) -> CascadeConfig:
        """Branches and adaptive drafting, if they fit and the user does not decide."""
        hsd = cls._with_branches(hsd, target_model_config, arguments)
        if "adaptive" in hsd.model_fields_set or cls.is_stock(hsd):
            return hsd
        adaptive = hsd.model_copy(update={"adaptive": True})
        reasons = {
            "a level that verifies nothing": bool(hsd.interleaved),
            "a model with branches": hsd.several_drafts,
            "horizontal_tokens": hsd.horizontal_tokens > 0,
            "a KV connector": connector_mistake(adaptive, arguments) is not None,
        }
        for reason, holds in reasons.items():
            if holds:
                logger.info("Drafts have fixed lengths: %s excludes 'adaptive'.", reason)
                return hsd
        return adaptive

    @classmethod
    def _with_branches(
        cls, hsd: CascadeConfig, target_model_config, arguments: EngineArgs
    ) -> CascadeConfig:
        """Several drafts of a request for sources alone, where that was measured: on a CPU."""
        level = hsd.levels[0]
        if len(hsd.levels) > 1 or level.kind != "sources" or "branches" in level.model_fields_set:
            return hsd
        most, budget = DEFAULT_BRANCHES, arguments.max_num_batched_tokens
        if budget is not None:
            # One slot is for drafting.
            most = min(most, (budget - 1) // (hsd.num_speculative_tokens + 1))
        found = level.model_copy(update={"branches": most})
        branching = hsd.model_copy(update={"levels": [found]})
        reasons = {
            "a GPU": not current_platform.is_cpu(),
            "multi-dimensional positions": target_model_config.uses_mrope,
            "a KV connector": connector_mistake(branching, arguments) is not None,
            "enable_dbo": arguments.enable_dbo,
            "max_num_batched_tokens": most < 2,
        }
        for reason, holds in reasons.items():
            if holds:
                logger.info("A request has one draft: %s excludes 'branches'.", reason)
                return hsd
        return branching

    @classmethod
    def check_runner(cls, hsd: CascadeConfig, target_parallel_config) -> None:
        if hsd.disable_by_batch_size is not None:
            raise UserError(
                "disable_by_batch_size works on vLLM's V2 runner only: remove it; "
                "'adaptive' looks at the load."
            )
        if hsd.enable_adaptive_verification:
            raise UserError(
                "enable_adaptive_verification works on vLLM's V2 runner only: remove it, or set "
                "VLLM_USE_V2_MODEL_RUNNER=1."
            )
        if cls.is_stock(hsd):
            cls.check_stock(hsd, ("block",))
            return
        for i, level in enumerate(hsd.levels):
            for name, source in level.named_sources(f"levels[{i}]"):
                if cls.hsd_runner in source.stock_on:
                    raise UserError(
                        f"{name}.{source.kind} drafts alone on vLLM's V1 runner, without other "
                        "levels or sources: keep it alone."
                    )
                source.check_v1(name)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.draft_sample_method = "probabilistic"
        # The cascade works on sampled tokens on the host: after bookkeeping, without async
        # scheduling.
        self.disable_padded_drafter_batch = True

    def uses_draft_model(self) -> bool:
        return True

    def uses_draft_kv_cache(self) -> bool:
        return True

    def use_eagle_block_drop(self) -> bool:
        # A head's entry at the last position of a block depends on the token after it.
        return any(level and level.method == "eagle3" for level in self.level_configs)

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        return 1
