"""Configuration of vLLM's own drafters with our block verification on the V2 runner."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import ValidationError
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config

from vllm_hsd.errors import UserError, quoted, refusal
from vllm_hsd.kernels.chain_verify import MAX_DRAFT_TOKENS
from vllm_hsd.runner_v2.hooks import STOCK_METHODS, NeedsHooks


@config
class V2BlockVerificationConfig(NeedsHooks, SpeculativeConfig):
    """Configuration with `rejection_sample_method: "hierarchical"`: block verification on V2."""

    hsd_runner: ClassVar[str] = "V2"
    hsd_applies_min_p: ClassVar[bool] = True

    @classmethod
    def create(
        cls, raw: dict[str, Any], target_model_config, target_parallel_config
    ) -> V2BlockVerificationConfig:
        """Check the user's keys and build the configuration.

        Raises:
            UserError: the drafter is not one that is served on V2, or vLLM refuses a key.
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
                f"rejection_sample_method 'hierarchical' works on vLLM's V2 runner with the "
                f"methods {', '.join(STOCK_METHODS)}, not with {quoted(parsed.method)}: set "
                "VLLM_USE_V2_MODEL_RUNNER=0 for the methods of the V1 runner."
            )
        if parsed.num_speculative_tokens > MAX_DRAFT_TOKENS:
            raise UserError(
                f"num_speculative_tokens is {parsed.num_speculative_tokens}, above "
                f"{MAX_DRAFT_TOKENS}, the longest draft of rejection_sample_method 'hierarchical' "
                "on vLLM's V2 runner: lower it."
            )
        if parsed.enable_adaptive_verification:
            raise UserError(
                "enable_adaptive_verification cuts drafts by what their tokens look like, and "
                "rejection_sample_method 'hierarchical' would not be exact: remove one of them."
            )
        return parsed
