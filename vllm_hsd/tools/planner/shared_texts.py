"""Texts that a model continues from many places: each is read once, its cache cut where needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

ATTENTION = {"full_attention", "sliding_attention"}
Layers = list[tuple[Tensor, Tensor]]


def text_config(model: Any) -> Any:
    """Of a model that reads pictures too, the part that says what its text is."""
    return model.config.get_text_config()


def keeps_keys(model: Any) -> bool:
    """Whether a model keeps keys and values alone, which can be cut anywhere."""
    if not isinstance(model, nn.Module):
        return False
    return set(getattr(text_config(model), "layer_types", None) or ATTENTION) <= ATTENTION


class SharedTexts:
    """Keys and values of the texts of the last contexts that a model has continued."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._kept: list[tuple[list[int], Layers]] = []

    def begin(
        self, forward: Callable[..., Any], contexts: Sequence[Sequence[int]]
    ) -> tuple[DynamicCache, Tensor, Tensor]:
        """What the model keeps of all but the last token of each context.

        Args:
            forward: runs the model on tokens, with arguments of transformers.

        Returns:
            cache, padded on the left; its mask int64 [B, L]; the last tokens int64 [B, 1].
        """
        ends = [len(context) - 1 for context in contexts]
        used = [self._read(forward, list(context)) for context in contexts]
        self._kept = list({id(each): each for each in used}.values())
        texts = [layers for _, layers in used]
        longest = max(ends)

        def padded(layer: int, part: int) -> Tensor:
            cut = (text[layer][part][:, :end] for text, end in zip(texts, ends, strict=True))
            return torch.stack(
                [nn.functional.pad(own, (0, 0, longest - own.shape[1], 0)) for own in cut]
            )

        found = [(padded(i, 0), padded(i, 1)) for i in range(len(texts[0]))]
        places = torch.arange(longest, device=self._device)
        mask = places >= longest - torch.tensor(ends, device=self._device)[:, None]
        last = torch.tensor([[context[-1]] for context in contexts], device=self._device)
        return DynamicCache(found or None), mask.long(), last

    def _read(self, forward: Callable[..., Any], context: list[int]) -> tuple[list[int], Layers]:
        """A text that begins with the context; keys and values [heads, L, D] of each layer."""
        end = max(len(context) - 1, 1)
        for kept in self._kept:
            if kept[0][:end] == context[:end]:
                return kept
        tokens = torch.tensor([context[:end]], device=self._device)
        cache: Any = DynamicCache()
        forward(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        layers = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
        self._kept.append((context[:end], layers))
        return self._kept[-1]
