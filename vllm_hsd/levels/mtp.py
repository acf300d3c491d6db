"""The target's layers that predict further tokens (multi-token prediction, MTP)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_hsd.levels.base import Keys, Name, Target, VllmModelKeys

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig


class MtpConfig(Keys):
    """MTP layers.

    Attributes:
        model: a checkpoint of their own; None where they are in the target's.
    """

    model: Name | None = None


class MtpLevelConfig(VllmModelKeys):
    """The target's layers that predict further tokens (MTP), run by vLLM's own drafter."""

    kind = "mtp"
    value_keys = MtpConfig
    only_lowest = "MTP layers take unverified tokens one by one"
    reads_target_states = True
    is_stock = True

    mtp: MtpConfig

    @property
    def stock_keys(self) -> dict[str, Any]:
        return {"method": "mtp", "model": self.mtp.model, **self.model_keys}

    def check(self, name: str, target: Target, draft_length: int) -> SpeculativeConfig:
        from vllm_hsd.host.draft_models import draft_config

        keys, model = self.model_keys, self.mtp.model
        if model is None:
            model = target.model_config.model
            # As vLLM does for layers in the target's checkpoint.
            keys = {"quantization": target.model_config.quantization, **keys}
        return draft_config(name, self.kind, model, keys, draft_length, target, "mtp")
