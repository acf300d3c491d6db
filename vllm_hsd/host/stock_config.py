"""Configurations of vLLM's own drafters with our block verification."""

from __future__ import annotations

from typing import Any, Self

from pydantic import ValidationError
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config

from vllm_hsd.config.level_checks import lost_state
from vllm_hsd.errors import UserError, quoted, refusal
from vllm_hsd.host.draft_models import name_layers
from vllm_hsd.host.engine_hooks import STOCK_METHODS, NeedsHooks
from vllm_hsd.rules import MAX_KERNEL_DRAFT


@config(repr=False)
class HierarchicalConfig(NeedsHooks, SpeculativeConfig):
    """Configuration with `rejection_sample_method: "hierarchical"`.

    Attributes:
        hsd_couples_all: verify every sampled request by coupling, seed or not.
        hsd_named: what messages call the head where it is a level of method "hsd", else empty.
    """

    hsd_couples_all = False
    hsd_named = ""

    @classmethod
    def create(cls, raw: dict[str, Any], target_model_config, target_parallel_config) -> Self:
        """Check the user's keys: UserError where we do not host the drafter, or vLLM refuses a
        key.
        """
        # vLLM's own checks of a method may ask for a package that it needs.
        if (method := raw.get("method")) is not None:
            _check_method(method)
        if (mistake := lost_state(target_model_config)) is not None:
            raise UserError(mistake)
        try:
            parsed = cls(
                **{**raw, "rejection_sample_method": "block"},
                target_model_config=target_model_config,
                target_parallel_config=target_parallel_config,
            )
        except ValidationError as error:
            raise UserError(refusal(error)) from error
        parsed.check()
        name_layers(parsed)
        return parsed

    def check(self) -> None:
        """Raises a UserError that names the key where the drafter cannot be hosted."""
        if self.enable_adaptive_verification and self.method in ("ngram", "ngram_gpu"):
            raise UserError(
                f"enable_adaptive_verification needs a drafter with probabilities, which "
                f"{quoted(self.method)} is not: remove it."
            )
        _check_method(self.method)
        if self.num_speculative_tokens > MAX_KERNEL_DRAFT:
            raise UserError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, above "
                f"{MAX_KERNEL_DRAFT}, the longest draft of rejection_sample_method "
                "'hierarchical': lower it."
            )


def _check_method(method: object) -> None:
    if method not in STOCK_METHODS:
        raise UserError(
            f"rejection_sample_method 'hierarchical' works with the methods "
            f"{', '.join(STOCK_METHODS)}, not with {quoted(method)}."
        )
