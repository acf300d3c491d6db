"""What an EAGLE-3 head needs of its target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.models.interfaces import supports_eagle3

from vllm_hsd.errors import UserError


def check_states(target: type, name: str) -> None:
    """Refuse a head of a target that gives it nothing to read.

    Args:
        target: vLLM's class of the target.
        name: what the message calls the level.

    Raises:
        UserError: the class gives no hidden states.
    """
    if not supports_eagle3(target):
        raise UserError(
            f"{name} reads hidden states that {target.__name__} does not give in vLLM: use "
            "another kind of level."
        )


def reads_final_states(head: Any) -> bool:
    """Whether a loaded head reads the target's last hidden states in place of inner ones."""
    return not getattr(head.model, "use_aux_hidden_state", True)


def check_head(
    head: Any, target: Any, target_config: ModelConfig, layers: Iterable[int] | None, name: str
) -> None:
    """Refuse a head that reads other states than its target's, or drafts other tokens.

    Args:
        head, target: vLLM's models, loaded.
        target_config: of the target.
        layers: after which the head wants states; None for those that vLLM's class chooses.
        name: what the message calls the level.

    Raises:
        UserError: names the level.
    """
    if not reads_final_states(head):
        _check_layers(head, target, target_config, layers, name)
    offsets = getattr(head, "draft_id_to_target_id", None)
    if offsets is None:
        return
    size = target_config.get_vocab_size()
    tokens = torch.arange(len(offsets), device=offsets.device) + offsets
    if tokens.min() < 0 or tokens.max() >= size or len(tokens.unique()) < len(tokens):
        raise UserError(
            f"{name} has a tensor 'd2t' whose tokens repeat or are none of the target's "
            f"{size}: use a head of this target."
        )


def _check_layers(
    head: Any, target: Any, target_config: ModelConfig, layers: Iterable[int] | None, name: str
) -> None:
    width = target_config.get_hidden_size()
    depth = target_config.hf_text_config.num_hidden_layers
    read = set(layers or target.get_eagle3_default_aux_hidden_state_layers())
    if not read <= set(range(depth + 1)):
        raise UserError(
            f"{name} reads states after the layers {sorted(read)}, but the target has "
            f"{depth}: use a head of this target."
        )
    reads = head.model.fc.input_size
    if reads != len(read) * width:
        raise UserError(
            f"{name} reads states of {reads} numbers, but {len(read)} layers of the target "
            f"give {len(read) * width}: use a head of this target."
        )


def share_with_target(head: Any, target: Any) -> None:
    """Give a head the target's embedding and output head where its checkpoint has none."""
    # Of an image-text model, what reads text.
    text_model = target.get_language_model() if hasattr(target, "get_language_model") else target
    if not head.has_own_embed_tokens:
        embedding = text_model.model.embed_tokens
        if isinstance(embedding, BaseLayerWithLoRA):
            # It looks up the adapters of the target's rows, which are not the head's.
            embedding = embedding.base_layer
        head.model.embed_tokens = embedding
    if not head.has_own_lm_head:
        head.lm_head = text_model.lm_head
