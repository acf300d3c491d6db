"""`SpeculativeConfig` for method "hsd" on the V1 runner."""

from __future__ import annotations

from typing import ClassVar

from vllm.config.utils import config

from vllm_hsd.config import CascadeConfig
from vllm_hsd.errors import UserError
from vllm_hsd.level_checks import DraftConfig
from vllm_hsd.runner_v1.hooks import NeedsHooks
from vllm_hsd.spec_config import CascadeSpeculativeConfig


@config
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
    def check_runner(cls, hsd: CascadeConfig) -> None:
        if hsd.disable_by_batch_size is not None:
            raise UserError(
                "disable_by_batch_size works on vLLM's V2 runner only: remove it, or set "
                "'adaptive', which looks at the load."
            )

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
