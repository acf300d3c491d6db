"""Configurations of vLLM's own drafters with our block verification."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import ValidationError
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config

from vllm_hsd.errors import NeedsV1, UserError, quoted, refusal
from vllm_hsd.shared_hooks import STOCK_METHODS, NeedsHooks
from vllm_hsd.verify import MAX_KERNEL_DRAFT


@config(repr=False)
class BlockVerificationConfig(NeedsHooks, SpeculativeConfig):
    """Configuration with `rejection_sample_method: "block"`, on whichever runner vLLM chooses."""


@config(repr=False)
class HierarchicalConfig(BlockVerificationConfig):
    """Configuration with `rejection_sample_method: "hierarchical"`, on a runner of our choice."""

    hsd_runner: ClassVar[str]
    hsd_applies_min_p: ClassVar[bool] = True

    @classmethod
    def create(cls, raw: dict[str, Any], target_model_config, target_parallel_config) -> Self:
        """Check the user's keys: UserError where the runner does not host the drafter, or vLLM
        refuses a key.
        """
        try:
            parsed = cls(
                **{**raw, "rejection_sample_method": "block"},
                target_model_config=target_model_config,
                target_parallel_config=target_parallel_config,
            )
        except ValidationError as error:
            raise UserError(refusal(error)) from error
        parsed.check_runner()
        return parsed

    def check_runner(self) -> None:
        """Raises a UserError that names the key where the runner cannot serve the drafter; a
        `NeedsV1` where V1 may.
        """


@config(repr=False)
class V1BlockVerificationConfig(HierarchicalConfig):
    """Block verification on V1."""

    hsd_runner: ClassVar[str] = "V1"

    def check_runner(self) -> None:
        if self.method not in STOCK_METHODS["V1"]:
            raise UserError(
                f"rejection_sample_method 'hierarchical' works with the methods "
                f"{', '.join(STOCK_METHODS['V1'])}, not with {quoted(self.method)}."
            )


@config(repr=False)
class V2BlockVerificationConfig(HierarchicalConfig):
    """Block verification on V2; `hsd_couples_all`: of every sampled request, seed or not."""

    hsd_runner: ClassVar[str] = "V2"
    hsd_couples_all = False

    def check_runner(self) -> None:
        if self.enable_adaptive_verification and self.method in ("ngram", "ngram_gpu"):
            raise UserError(
                f"enable_adaptive_verification needs a drafter with probabilities, which "
                f"{quoted(self.method)} is not: remove it."
            )
        if self.method not in STOCK_METHODS["V2"]:
            raise NeedsV1(
                f"rejection_sample_method 'hierarchical' works on vLLM's V2 runner with the "
                f"methods {', '.join(STOCK_METHODS['V2'])}, not with {quoted(self.method)}: set "
                "VLLM_USE_V2_MODEL_RUNNER=0 for the methods of the V1 runner."
            )
        if self.num_speculative_tokens > MAX_KERNEL_DRAFT:
            raise NeedsV1(
                f"num_speculative_tokens is {self.num_speculative_tokens}, above "
                f"{MAX_KERNEL_DRAFT}, the longest draft of rejection_sample_method 'hierarchical' "
                "on vLLM's V2 runner: lower it."
            )
