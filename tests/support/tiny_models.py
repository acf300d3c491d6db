"""The random models of `vllm-hsd verify --self-test`: changed copies, and what they write."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

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


def greedy_text(model: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The model's `count` greedy tokens after each prompt by transformers; none ends a text."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    network.generation_config.eos_token_id = None
    given = {"max_new_tokens": count, "do_sample": False}
    return [network.generate(torch.tensor([p]), **given)[0, -count:].tolist() for p in prompts]
