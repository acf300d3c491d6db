"""Changed copies of the random models of `vllm-hsd verify --self-test`, on which most tests run."""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM


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


def with_sliding_window(model: str, directory: Path, window: int) -> str:
    """The same weights as a Mistral, which attends to the last `window` tokens only."""
    loaded = LlamaForCausalLM.from_pretrained(model)
    config = {**loaded.config.to_dict(), "sliding_window": window}
    for key in ("model_type", "architectures", "transformers_version"):
        config.pop(key, None)
    mistral = MistralForCausalLM(MistralConfig(**config))
    mistral.load_state_dict(loaded.state_dict())
    mistral.save_pretrained(directory)
    return str(directory)
