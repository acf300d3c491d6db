"""Exit heads: a norm and a linear head on one of the target's layers, stored on disk."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_hsd.checked_files import TensorHeader, read_tensors, written_whole
from vllm_hsd.errors import UserError, quoted

FILE_NAME = "exit_head.safetensors"

# Targets that an exit can leave early: after their decoder layers come a norm and a linear head.
# tests/engines/test_architectures.py serves each of them.
EXIT_ARCHITECTURES = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)


@dataclass(frozen=True)
class ExitHead:
    """A head trained to match the target's last layer from an earlier one.

    Attributes:
        layer: the head reads the hidden states after this many layers.
        norm: [hidden] weight of the RMS norm before the head.
        weight: [V, hidden] linear head.
        eps: of the norm.
    """

    layer: int
    norm: torch.Tensor
    weight: torch.Tensor
    eps: float

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] states after `layer` layers -> [n, V] logits."""
        return self.normed(hidden) @ self.weight.T

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] states -> the same states, normed."""
        return torch.nn.functional.rms_norm(hidden, self.norm.shape, self.norm, self.eps)

    def to(self, device: torch.device, dtype: torch.dtype) -> ExitHead:
        """The same head on another device and of another dtype."""
        return replace(self, norm=self.norm.to(device, dtype), weight=self.weight.to(device, dtype))


def write_exit_head(head: ExitHead, directory: str | Path) -> None:
    """Store a head as `exit_head.safetensors` in a directory, which is made.

    Raises:
        UserError: it cannot be written.
    """
    with written_whole(Path(directory) / FILE_NAME) as unfinished:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        save_file(
            {"norm": head.norm.contiguous(), "weight": head.weight.contiguous()},
            unfinished,
            metadata={"layer": str(head.layer), "eps": repr(head.eps)},
        )


@dataclass(frozen=True)
class ExitHeadHeader:
    """What a stored head says about itself without its weights.

    Attributes:
        layer: the head reads the hidden states after this many layers.
        eps: of the norm.
        shape: (V, hidden) of the linear head.
    """

    layer: int
    eps: float
    shape: tuple[int, int]


def exit_head_header(directory: str) -> ExitHeadHeader:
    """Check a stored head's header.

    Raises:
        UserError: the directory holds no such head.
    """
    return _read(directory, with_values=False)[0]


@lru_cache(maxsize=4)
def read_exit_head(directory: str) -> ExitHead:
    """Read what `write_exit_head` stored.

    Raises:
        UserError: the directory holds no such head, or it holds a weight that is not finite.
    """
    header, tensors = _read(directory)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(_blame(directory, f"'{name}' holds a value that is not finite"))
    return ExitHead(header.layer, tensors["norm"], tensors["weight"], header.eps)


def _read(directory: str, with_values: bool = True) -> tuple[ExitHeadHeader, dict[str, Any]]:
    if not os.path.isdir(directory):
        raise UserError(
            f"exit_head: no directory {quoted(directory)}; `vllm-hsd build exit-heads` writes one."
        )
    path, blame = os.path.join(directory, FILE_NAME), partial(_blame, directory)
    return read_tensors(path, ("norm", "weight"), _check_header, blame, "pt", with_values)


def _blame(directory: str, reason: str) -> str:
    return (
        f"exit_head: {quoted(directory)} holds no readable {FILE_NAME} ({reason}); give a "
        "directory layer-K that `vllm-hsd build exit-heads` wrote."
    )


def _check_header(header: TensorHeader) -> ExitHeadHeader:
    """Check everything about a file except the values of its weights."""
    layer, eps = header.number("layer", 0, 10_000), float(header.facts.get("eps", "nan"))
    if not 0 < eps < 1:
        raise ValueError("its eps is not between 0 and 1")
    if not set(header.types.values()) <= {"F64", "F32", "F16", "BF16"}:
        raise ValueError("its weights are not floating-point numbers")
    width, shape = header.shapes["norm"], header.shapes["weight"]
    if len(shape) != 2 or 0 in shape or width != shape[1:]:
        raise ValueError("the shapes of 'norm' and 'weight' do not fit")
    return ExitHeadHeader(layer, eps, (shape[0], shape[1]))
