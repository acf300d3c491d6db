"""`SpeculativeConfig` for method "hsd", as far as it does not depend on the model runner.

Ours outside, one of vLLM's own per level inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, SkipValidation
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.utils.hashing import safe_hash

from vllm_hsd.config import CascadeConfig
from vllm_hsd.core.row_layout import PrivateBlocks
from vllm_hsd.draft_models import DraftConfig
from vllm_hsd.errors import UserError
from vllm_hsd.level_checks import check_cascade
from vllm_hsd.levels import Target

logger = init_logger(f"vllm.{__name__}")


@config(repr=False)
class CascadeSpeculativeConfig(SpeculativeConfig):
    """What vLLM carries around for a cascade; build it with `create`."""

    hsd_method: ClassVar[str]
    """The method that vLLM sees."""
    hsd_applies_min_p: ClassVar[bool] = True

    method: str | None = None  # type: ignore[assignment]
    """Widens vLLM's closed list of methods."""
    hsd: SkipValidation[Any] = None
    """The parsed `CascadeConfig`."""
    level_configs: SkipValidation[list] = Field(default_factory=list)
    """One stock `SpeculativeConfig` of its own method per level, None where no model loads."""
    hsd_least_rows: int = 1
    """As `hsd.branches`, or 1 where that is a default, which the KV cache may have no room for."""

    @classmethod
    def create(cls, raw: dict, target_model_config, target_parallel_config, arguments: EngineArgs):
        """Check the user's keys against the target and the engine's arguments.

        Raises:
            UserError: a sentence for every mistake, which names the key and the fix; of the class
                that `check_runner` raised.
        """
        given = CascadeConfig.parse({key: value for key, value in raw.items() if key != "method"})
        hsd = cls.with_defaults(given, target_model_config, arguments)
        mistakes: list[str] = []
        refusal = UserError
        try:
            cls.check_runner(hsd, target_parallel_config)
        except UserError as error:
            mistakes, refusal = list(error.args), type(error)
        if target_model_config.runner_type == "pooling":
            mistakes.append(
                "runner 'pooling' generates no tokens that method 'hsd' could draft: remove the "
                "speculative configuration."
            )
        target = Target(target_model_config, target_parallel_config, DraftConfig)
        level_configs = check_cascade(hsd, target, arguments, mistakes)
        if mistakes:
            raise refusal(*mistakes)
        if hsd.untested:
            logger.warning_once(
                "No cascade was ever tested on a target that keeps recurrent state, as %s does.",
                target_model_config.model,
            )
        return cls(
            method=cls.hsd_method,
            hsd=hsd,
            level_configs=level_configs,
            hsd_least_rows=given.branches,
            # vLLM schedules one list of draft tokens, in which V2 repeats the root for each branch.
            num_speculative_tokens=hsd.branches * (hsd.num_speculative_tokens + 1) - 1,
            enable_adaptive_verification=hsd.enable_adaptive_verification,
            target_model_config=target_model_config,
            target_parallel_config=target_parallel_config,
        )

    @classmethod
    def is_stock(cls, hsd: CascadeConfig) -> bool:
        """Whether vLLM's own drafter serves the only level, or its last source."""
        return len(hsd.levels) == 1 and hsd.levels[0].drafters[-1].is_stock

    @classmethod
    def stock_keys(cls, hsd: CascadeConfig) -> dict[str, Any]:
        """vLLM's own configuration of such a cascade."""
        given = {"num_speculative_tokens": hsd.num_speculative_tokens}
        given |= hsd.levels[0].drafters[-1].stock_keys
        if hsd.enable_adaptive_verification:
            given["enable_adaptive_verification"] = True
        return {**given, "draft_sample_method": "probabilistic"}

    @classmethod
    def check_stock(cls, hsd: CascadeConfig, verifiers: tuple[str, ...]) -> None:
        """Check such a cascade.

        Args:
            verifiers: those that can verify it.

        Raises:
            UserError: it has a key that vLLM's drafter does not know.
        """
        name, source = hsd.levels[0].named_sources("levels[0]")[-1]
        for key, holds in {
            "adaptive": hsd.adaptive,
            "verifier": hsd.verifier not in verifiers,
            f"{name}.temperature_scale": hsd.options()[0].temperature_scale != 1,
            f"{name}.stopping": hsd.options()[0].stopping != "fixed",
        }.items():
            if holds:
                raise UserError(
                    f"{key} has no meaning with {name}.{source.kind}, which vLLM's own drafter "
                    "serves: remove it."
                )

    @classmethod
    def with_defaults(
        cls, hsd: CascadeConfig, target_model_config, arguments: EngineArgs
    ) -> CascadeConfig:
        """The cascade with the runner's defaults for keys that were not given."""
        return hsd

    @classmethod
    def check_runner(cls, hsd: CascadeConfig, target_parallel_config) -> None:
        """Raises a UserError that names the key where the runner cannot serve the cascade."""

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

    def lookahead(self, vllm_config: Any) -> int | None:
        """Tokens past those that the target computes for which a request has slots.

        None: as vLLM reserves them, without branches.
        """
        if self.hsd.branches == 1:
            return None
        rows = self.rows(vllm_config, vllm_config.cache_config.num_gpu_blocks)
        return self._private_blocks(vllm_config).lookahead(rows)

    def rows(self, vllm_config: Any, blocks: int | None, groups: int = 1) -> int:
        """Drafts of a request that the target verifies together, at most.

        Fewer than configured where that is a default and the KV cache or texts lack room; the
        scheduler and the workers count alike.

        Args:
            vllm_config: vLLM's.
            blocks: of the cache; None while it is not there.
            groups: KV-cache groups.

        Raises:
            UserError: there is no room for what the user asked for.
        """
        if blocks is None:
            return int(self.hsd.branches)
        for rows in range(self.hsd.branches, self.hsd_least_rows - 1, -1):
            mistake = self._room_mistake(vllm_config, blocks, groups, rows)
            if mistake is None:
                return rows
        assert mistake is not None
        raise UserError(mistake)

    def branch_mistakes(self, vllm_config: Any) -> Iterator[str]:
        """Why no runner can host the branches: a sentence for each reason."""
        if vllm_config.parallel_config.use_ubatching:
            yield (
                "levels[0].branches does not run with microbatches: remove branches or enable_dbo."
            )
        # vLLM sets slots for drafting aside.
        tokens = self.num_speculative_tokens + 1 + self.max_num_new_slots_for_drafting
        budget = vllm_config.scheduler_config.max_num_batched_tokens
        if tokens > budget:
            # vLLM would wait for ever to schedule a request that it has padded to so many.
            yield (
                f"levels[0].branches and num_speculative_tokens make {tokens} tokens of a request, "
                f"above max_num_batched_tokens={budget}: raise it or lower one of them."
            )

    def _private_blocks(self, vllm_config: Any) -> PrivateBlocks:
        return PrivateBlocks(vllm_config.cache_config.block_size, self.hsd.num_speculative_tokens)

    def _room_mistake(self, vllm_config: Any, blocks: int, groups: int, rows: int) -> str | None:
        """Why there is no room for `rows` drafts of every request; see `rows`."""
        if rows == 1:
            return None
        size = vllm_config.cache_config.block_size
        requests = vllm_config.scheduler_config.max_num_seqs
        layout = self._private_blocks(vllm_config)
        needed = -(-layout.lookahead(rows) // size) * groups
        if requests * needed > blocks:
            return (
                f"levels[0].branches reserves {needed} blocks of the KV cache for each of "
                f"max_num_seqs={requests} requests, and the cache has {blocks}: lower branches or "
                "max_num_seqs, or enlarge the cache."
            )
        longest = vllm_config.model_config.max_model_len
        behind = int(layout.first(np.zeros(1), rows)[0]) * size
        if behind > longest:
            return (
                f"levels[0].branches takes {behind} tokens of max_model_len={longest} with blocks "
                f"of {size}: raise max_model_len, or lower branches or block_size."
            )
        return None

    def verify_equal_vocab_size_if_draft_model(self) -> None:
        """Every level has been checked."""

    def compute_hash(self) -> str:
        models = [level.compute_hash() for level in self.level_configs if level is not None]
        return safe_hash(
            str(("hsd", models, self.hsd.model_dump_json())).encode(),
            usedforsecurity=False,
        ).hexdigest()

    def __repr__(self) -> str:
        names = [level.description for level in self.hsd.levels]
        return (
            f"SpeculativeConfig(method='hsd', levels={names}, "
            f"num_spec_tokens={self.hsd.num_speculative_tokens}, verifier={self.hsd.verifier!r})"
        )
