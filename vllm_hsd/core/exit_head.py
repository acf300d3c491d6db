"""Exit heads: a norm and a linear head on one of the target's layers, stored on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

FILE_NAME = "exit_head.safetensors"

# Targets that an exit can leave early: their decoder layers pass on one residual stream, and
# behind the last of them come an RMS norm and a linear head, nothing else.
EXIT_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


@dataclass(frozen=True)
class ExitHead:
    """A head trained to match the target's last layer from an earlier one.

    Attributes:
        layer: the head reads the hidden states behind this many layers.
        norm: [hidden] weight of the RMS norm before the head.
        weight: [V, hidden] linear head.
        eps: of the norm.
    """

    layer: int
    norm: torch.Tensor
    weight: torch.Tensor
    eps: float

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] states behind `layer` layers -> [n, V] logits."""
        normed = torch.nn.functional.rms_norm(hidden, self.norm.shape, self.norm, self.eps)
        return normed @ self.weight.T

    def to(self, device: torch.device, dtype: torch.dtype) -> ExitHead:
        """The same head on another device and of another dtype."""
        return replace(self, norm=self.norm.to(device, dtype), weight=self.weight.to(device, dtype))


def write_exit_head(head: ExitHead, directory: str | Path) -> None:
    """Store a head as `exit_head.safetensors` in a directory, which is made."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    save_file(
        {"norm": head.norm.contiguous(), "weight": head.weight.contiguous()},
        Path(directory) / FILE_NAME,
        metadata={"layer": str(head.layer), "eps": repr(head.eps)},
    )


@lru_cache(maxsize=4)
def read_exit_head(directory: str) -> ExitHead:
    """Read what `write_exit_head` stored.

    Raises:
        ValueError: the directory holds no such head.
    """
    path = Path(directory) / FILE_NAME
    try:
        with safe_open(path, framework="pt") as stored:
            facts = stored.metadata()
            head = ExitHead(
                layer=int(facts["layer"]),
                norm=stored.get_tensor("norm"),
                weight=stored.get_tensor("weight"),
                eps=float(facts["eps"]),
            )
            if head.weight.shape[1:] != head.norm.shape:
                raise ValueError("its norm and its weight differ in width")
            return head
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"exit_head: '{directory}' holds no readable {FILE_NAME} ({reason}); give a directory "
            "layer-K that `vllm-hsd train-heads` wrote."
        ) from error
