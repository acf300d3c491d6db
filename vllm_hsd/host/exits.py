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

from vllm_hsd.cascade.exit_head import ExitHead


class ResidualStream(nn.Module):
    """In the place of a final norm: the states that a head reads."""

    def forward(
        self, hidden: torch.Tensor, *residual: torch.Tensor | None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[n, hidden] layer output and the residual stream, if the decoder keeps them apart.

        Before the first layer there is none (None).
        """
        if not residual:
            return hidden
        whole = hidden if residual[0] is None else hidden + residual[0]
        return whole, whole


class TargetExit:
    """What a level that is the target's first layers does on either runner.

    It runs on the target's weights and writes the target's KV cache: the lower layers' entries of
    target and exit are the same for the same tokens, so it has no cache of its own to fill.

    Attributes:
        num_layers: layers that run, 0 (the embedding, with a head) to the target's depth.
        head: trained for them; None for the target's own norm and head.
    """

    num_layers: int
    head: ExitHead | None

    def attach(self, target: Any, named: str = "") -> None:
        """Share the layers of the loaded target; messages call the level `named`."""
        self.target = target.unwrap() if hasattr(target, "unwrap") else target
        self.layers = self.target.model.layers[: self.num_layers]
        self.layer_names = attention_layer_names(self.layers)
        norm = None if self.head is None else ResidualStream()
        self.decoder = leave_after(self.target.model, self.num_layers, norm)

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[n, hidden] states after the last of the layers."""
        # Not __call__: that is the whole target where it is compiled.
        return self.decoder.forward(input_ids, positions, None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] logits of [n, hidden] states."""
        if self.head is not None:
            return self.head.logits(hidden)
        return self.target.compute_logits(hidden)


def leave_after(decoder: Any, num_layers: int, norm: nn.Module | None = None) -> Any:
    """A decoder that shares another one's weights and ends after `num_layers` layers.

    Args:
        decoder: `model` of one of vLLM's causal language models; not changed.
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
