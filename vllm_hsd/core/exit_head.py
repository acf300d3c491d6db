"""Exit heads: a norm and a linear head on one of the target's layers, stored on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_hsd.checked_files import written_whole
from vllm_hsd.errors import UserError, brief, quoted

FILE_NAME = "exit_head.safetensors"

# Targets that an exit can leave early: after their decoder layers come a norm and a linear head.
# tests/runner_v1/test_architectures.py serves each of them.
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
    with _reading(directory) as stored:
        return _header(stored)


@lru_cache(maxsize=4)
def read_exit_head(directory: str) -> ExitHead:
    """Read what `write_exit_head` stored.

    Raises:
        UserError: the directory holds no such head, or it holds a weight that is not finite.
    """
    with _reading(directory) as stored:
        header = _header(stored)
        norm, weight = stored.get_tensor("norm"), stored.get_tensor("weight")
        for name, tensor in (("norm", norm), ("weight", weight)):
            if not torch.isfinite(tensor).all():
                raise ValueError(f"'{name}' holds a value that is not finite")
        return ExitHead(header.layer, norm, weight, header.eps)


@contextmanager
def _reading(directory: str) -> Iterator[Any]:
    """The open file of a head; whatever goes wrong while it is open is a fault of the file."""
    path = os.path.join(directory, FILE_NAME)
    if not os.path.isdir(directory):
        raise UserError(
            f"exit_head: no directory {quoted(directory)}; `vllm-hsd build exit-heads` writes one."
        )
    try:
        with safe_open(path, framework="pt") as stored:
            yield stored
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"exit_head: {quoted(directory)} holds no readable {FILE_NAME} ({brief(error)}); give "
            "a directory layer-K that `vllm-hsd build exit-heads` wrote."
        ) from error


def _header(stored: Any) -> ExitHeadHeader:
    """Check everything about an open file except the values of its weights."""
    facts = stored.metadata() or {}
    if not {"layer", "eps"} <= facts.keys() or set(stored.keys()) != {"norm", "weight"}:
        raise ValueError("it holds other tensors or no metadata")
    layer, eps = int(facts["layer"]), float(facts["eps"])
    if not 1 <= layer <= 10_000:
        raise ValueError("its layer is not between 1 and 10000")
    if not 0 < eps < 1:
        raise ValueError("its eps is not between 0 and 1")
    norm, weight = stored.get_slice("norm"), stored.get_slice("weight")
    if not {norm.get_dtype(), weight.get_dtype()} <= {"F64", "F32", "F16", "BF16"}:
        raise ValueError("its weights are not floating-point numbers")
    width, shape = tuple(norm.get_shape()), tuple(weight.get_shape())
    if len(shape) != 2 or 0 in shape or width != shape[1:]:
        raise ValueError("the shapes of 'norm' and 'weight' do not fit")
    return ExitHeadHeader(layer, eps, shape)
