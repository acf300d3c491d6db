"""The target's first layers with a trained head."""

from __future__ import annotations

from typing import Any

from vllm_hsd.errors import UserError, quoted
from vllm_hsd.levels.base import Name, Target, VerifyingKeys, named
from vllm_hsd.levels.early_exit import check_architecture


class ExitHeadLevelConfig(VerifyingKeys):
    """The target's first layers with a trained head.

    Attributes:
        exit_head: directory that `vllm-hsd build exit-heads` wrote.
    """

    kind = "exit_head"
    runs_target = True
    drafts_by = "model"

    exit_head: Name

    @property
    def target_layers(self) -> int:
        """Layers that the head was trained after.

        Raises:
            UserError: the directory holds no such head.
        """
        from vllm_hsd.cascade.exit_head import exit_head_header

        return exit_head_header(self.exit_head).layer

    def check(self, name: str, target: Target, draft_length: int) -> None:
        check_architecture(f"{name}.{self.kind}", target)
        with named(name):
            self._check_file(target)

    def _check_file(self, target: Target) -> None:
        from vllm_hsd.cascade.exit_head import exit_head_header, read_exit_head

        header, config = exit_head_header(self.exit_head), target.model_config
        needed = (config.get_vocab_size(), config.get_hidden_size())
        if header.shape != needed:
            raise UserError(
                f"exit_head: {quoted(self.exit_head)} has the shape {header.shape} and the target "
                f"needs {needed}: train it for this target."
            )
        layers = config.hf_text_config.num_hidden_layers
        if header.layer > layers:
            raise UserError(
                f"exit_head: {quoted(self.exit_head)} sits on layer {header.layer}, but the target "
                f"has {layers}: train it for this target."
            )
        read_exit_head(self.exit_head)

    def build(self, speculator: Any, index: int) -> Any:
        from vllm_hsd.cascade.exit_head import read_exit_head
        from vllm_hsd.host.program_models import ProgramExit

        head = read_exit_head(self.exit_head)
        return ProgramExit(speculator, index, head.layer, head)
