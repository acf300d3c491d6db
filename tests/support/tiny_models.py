"""Changed copies of the random models of `vllm-hsd verify --self-test`, on which most tests run."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .damage import change_config, damaged_copy


def resized(source: str, directory: Path, rows: int) -> str:
    """A copy of a model with another number of rows; new ones are as likely as the old."""
    model = LlamaForCausalLM.from_pretrained(source)
    head = model.lm_head.weight.detach().clone()
    torch.manual_seed(rows)
    new = torch.randn(rows, head.shape[1]) * head.std()
    new[: len(head)] = head[:rows]
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(new)
    model.save_pretrained(directory)
    return str(directory)


def with_sliding_window(model: str, directory: Path, window: int, every: bool = False) -> str:
    """The same weights, all layers (but the last one, unless `every`) attending to the last
    `window` tokens only."""
    layers = LlamaConfig.from_pretrained(model).num_hidden_layers
    kinds = ["sliding_attention"] * layers
    if not every:
        kinds[-1] = "full_attention"
    return damaged_copy(model, directory, change_config(sliding_window=window, layer_types=kinds))
