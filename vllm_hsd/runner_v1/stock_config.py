"""Configurations of vLLM's own drafters with our block verification on the V1 runner."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import ValidationError
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config

from vllm_hsd.errors import UserError, quoted, refusal
from vllm_hsd.runner_v1.hooks import STOCK_METHODS, NeedsHooks


@config
class BlockVerificationConfig(NeedsHooks, SpeculativeConfig):
    """Configuration with `rejection_sample_method: "block"`, on whichever runner vLLM chooses."""


@config
class V1BlockVerificationConfig(BlockVerificationConfig):
    """Configuration with `rejection_sample_method: "hierarchical"`: block verification on V1."""

    hsd_runner: ClassVar[str] = "V1"

    @classmethod
    def create(
        cls, raw: dict[str, Any], target_model_config, target_parallel_config
    ) -> V1BlockVerificationConfig:
        """Check the user's keys and build the configuration.

        Raises:
            UserError: the drafter is not one that vLLM's V1 runner hosts, or vLLM refuses a key.
        """
        try:
            parsed = cls(
                **{**raw, "rejection_sample_method": "block"},
                target_model_config=target_model_config,
                target_parallel_config=target_parallel_config,
            )
        except ValidationError as error:
            raise UserError(refusal(error)) from error
        if parsed.method not in STOCK_METHODS:
            raise UserError(
                f"rejection_sample_method 'hierarchical' works with the methods "
                f"{', '.join(STOCK_METHODS)}, not with {quoted(parsed.method)}."
            )
        return parsed
