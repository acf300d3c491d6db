"""The target's decoder, left after some of its layers.

vLLM's decoders run `layers[start_layer:end_layer]` between the embedding and the final norm, for
pipeline parallelism. A copy that ends earlier and shares all weights is an early exit with the
model's own scaling, whatever its layers pass on to each other.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase


class ResidualStream(nn.Module):
    """In the place of a final norm: the states that a head reads."""

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[n, hidden] layer output and the residual stream, if the decoder keeps them apart."""
        if residual is None:
            return hidden
        return hidden + residual, residual


def leave_after(decoder: Any, num_layers: int, norm: nn.Module | None = None) -> Any:
    """A decoder that shares another one's weights and ends after `num_layers` layers.

    Args:
        decoder: `model` of one of vLLM's causal language models; not changed.
        num_layers: 1 to the decoder's depth.
        norm: in the place of its final norm.
    """
    short = copy.copy(decoder)
    short._modules = dict(decoder._modules)
    short.end_layer = min(num_layers, decoder.end_layer)
    short.aux_hidden_state_layers = ()
    if norm is not None:
        short.norm = norm
    return short


def attention_layer_names(layers: Iterable[Any]) -> set[str]:
    """Names under which vLLM knows the attention of decoder layers."""
    # The abstract class does not declare the name that all its subclasses have.
    base: Any = AttentionLayerBase
    modules = (module for layer in layers for module in layer.modules())
    return {module.layer_name for module in modules if isinstance(module, base)}
