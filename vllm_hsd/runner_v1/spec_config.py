"""`SpeculativeConfig` for method "hsd": ours outside, one of vLLM's own per level inside."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, SkipValidation
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.utils.hashing import safe_hash

from vllm_hsd.config import CascadeConfig
from vllm_hsd.level_config import (
    Eagle3LevelConfig,
    FirstOfLevelConfig,
    ModelLevelConfig,
    source_names,
    sources,
)
from vllm_hsd.runner_v1.hooks import NeedsHooks
from vllm_hsd.runner_v1.level_checks import (
    check_exit_order,
    check_level,
    check_target,
    draft_config,
)


@config
class HsdSpeculativeConfig(NeedsHooks, SpeculativeConfig):
    """What vLLM carries around for a cascade; build it with `create`."""

    hsd_runner: ClassVar[str] = "V1"
    hsd_applies_min_p: ClassVar[bool] = True

    method: str | None = None  # type: ignore[assignment]
    """Widens vLLM's closed list of methods."""
    hsd: SkipValidation[Any] = None
    """The parsed `CascadeConfig`."""
    level_configs: SkipValidation[list] = Field(default_factory=list)
    """One stock `SpeculativeConfig` of method "draft_model" or "eagle3" per level, None where no
    model loads."""

    @classmethod
    def create(cls, raw: dict, target_model_config, target_parallel_config):
        """Check the user's keys and build the configuration.

        Raises:
            UserError: one sentence that names the key and the fix.
        """
        hsd = CascadeConfig.parse({key: value for key, value in raw.items() if key != "method"})
        check_target(target_model_config, target_parallel_config)
        levels: list[SpeculativeConfig | None] = []
        for i, (level, draft_length) in enumerate(zip(hsd.levels, hsd.draft_lengths, strict=True)):
            model = None
            for j, source in enumerate(sources(level)):
                name = f"levels[{i}]"
                if isinstance(level, FirstOfLevelConfig):
                    name += f".first_of[{j}]"
                if isinstance(source, ModelLevelConfig | Eagle3LevelConfig):
                    model = draft_config(
                        name, source, draft_length, target_model_config, target_parallel_config
                    )
                else:
                    check_level(name, source, target_model_config)
            levels.append(model)
        check_exit_order(hsd.levels)
        return cls(
            method="hsd",
            hsd=hsd,
            level_configs=levels,
            num_speculative_tokens=hsd.num_speculative_tokens,
            target_model_config=target_model_config,
            target_parallel_config=target_parallel_config,
        )

    def __post_init__(self) -> None:
        # Code of vLLM that knows one drafter sees the highest level that is a model of its own, or
        # an EAGLE-3 head: the runner reads from it which states of the target to keep.
        models = [level for level in self.level_configs if level is not None]
        models.sort(key=lambda level: level.method == "eagle3")
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config
        if models:
            self.draft_model_config = models[-1].draft_model_config
            self.draft_parallel_config = models[-1].draft_parallel_config
        self.model = self.draft_model_config.model
        self.draft_tensor_parallel_size = self.target_parallel_config.tensor_parallel_size
        self.prompt_lookup_max = self.prompt_lookup_min = 0
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

    def compute_hash(self) -> str:
        models = [level.compute_hash() for level in self.level_configs if level is not None]
        return safe_hash(
            str(("hsd", models, self.hsd.model_dump_json())).encode(), usedforsecurity=False
        ).hexdigest()

    def __repr__(self) -> str:
        names = [
            source_names(level)
            if isinstance(level, FirstOfLevelConfig)
            else getattr(level, level.kind)
            for level in self.hsd.levels
        ]
        return (
            f"SpeculativeConfig(method='hsd', levels={names}, "
            f"num_spec_tokens={self.num_speculative_tokens}, verifier={self.hsd.verifier!r})"
        )
