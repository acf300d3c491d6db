"""A draft model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_hsd.levels.base import (
    BranchKeys,
    Name,
    Target,
    VerifyingKeys,
    VllmModelKeys,
)

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig


class ModelLevelConfig(VerifyingKeys, VllmModelKeys, BranchKeys):
    """A draft model.

    Attributes:
        model: path or name.
    """

    kind = "model"
    drafts_by = "model"

    model: Name

    @classmethod
    def short_name(cls, value: object) -> str:
        """The last part of the path."""
        return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else cls.kind

    def check(self, name: str, target: Target, draft_length: int) -> SpeculativeConfig:
        from vllm_hsd.host.draft_models import draft_config

        key = name, self.kind, self.model
        return draft_config(*key, self.model_keys, draft_length, target, "draft_model")

    def build(self, speculator: Any, index: int) -> Any:
        from vllm_hsd.host.program_models import ProgramModel

        return ProgramModel(speculator, index)
