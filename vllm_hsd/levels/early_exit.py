"""The target's first layers with its own norm and head."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from vllm_hsd.errors import UserError
from vllm_hsd.levels.base import Target, VerifyingKeys


class EarlyExitLevelConfig(VerifyingKeys):
    """The target's first layers with its own norm and head.

    Attributes:
        early_exit: how many layers run.
    """

    kind = "early_exit"
    runs_target = True
    drafts_by = "model"

    early_exit: Annotated[int, Field(ge=1, le=10_000)]

    @field_validator("early_exit", mode="before")
    @classmethod
    def _not_the_embedding(cls, value: object) -> object:
        if value == 0 and type(value) is int:
            raise ValueError(
                "is 0, the embedding, which the target's own head cannot read: give the directory "
                "of a head from `vllm-hsd build exit-heads --layers 0` as exit_head"
            )
        return value

    @property
    def target_layers(self) -> int:
        return self.early_exit

    @classmethod
    def short_name(cls, value: object) -> str:
        return f"exit {value}"

    def check(self, name: str, target: Target, draft_length: int) -> None:
        check_architecture(f"{name}.{self.kind}", target)
        layers = target.model_config.hf_text_config.num_hidden_layers
        if self.early_exit > layers:
            raise UserError(
                f"{name}.early_exit is {self.early_exit}, but the target has {layers} layers: "
                "lower it."
            )

    def build(self, speculator: Any, index: int) -> Any:
        from vllm_hsd.host.program_models import ProgramExit

        return ProgramExit(speculator, index, self.early_exit)


def check_architecture(key: str, target: Target) -> None:
    """Check that the target can be left early.

    Raises:
        UserError: names the key.
    """
    from vllm_hsd.cascade.exit_head import EXIT_ARCHITECTURES

    found = target.model_config.architecture
    if found not in EXIT_ARCHITECTURES:
        raise UserError(
            f"{key} works with the targets {', '.join(EXIT_ARCHITECTURES)}, not {found}: use "
            "another kind of level."
        )
