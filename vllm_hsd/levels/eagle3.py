"""An EAGLE-3 head of the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_hsd.levels.base import (
    Name,
    SamplingKeys,
    Target,
    VllmModelKeys,
)

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig


class Eagle3LevelConfig(SamplingKeys, VllmModelKeys):
    """An EAGLE-3 head of the target, which reads the target's states of verified tokens.

    Attributes:
        eagle3: path or name of the head.
    """

    kind = "eagle3"
    only_lowest = "an EAGLE-3 head takes unverified tokens one by one"
    reads_target_states = True
    drafts_by = "model"
    is_stock = True

    eagle3: Name

    @property
    def stock_keys(self) -> dict[str, Any]:
        return {"method": "eagle3", "model": self.eagle3, **self.model_keys}

    def check(self, name: str, target: Target, draft_length: int) -> SpeculativeConfig:
        from vllm_hsd.host.draft_models import draft_config

        key = name, self.kind, self.eagle3
        return draft_config(*key, self.model_keys, draft_length, target, "eagle3")

    def build(self, speculator: Any, index: int) -> Any:
        """Before vLLM measures memory."""
        from vllm_hsd.host.target_head import ProgramHead

        return ProgramHead(speculator, index)
