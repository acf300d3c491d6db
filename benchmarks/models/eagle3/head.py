"""Heads are written as vLLM loads them; the arithmetic is `vllm_hsd.tools.planner.eagle3_head`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_hsd.tools.planner.eagle3_head import Head


def save_head(head: Head, directory: Path) -> None:
    """Writes the head in bfloat16 as vLLM's `LlamaForCausalLMEagle3` checkpoint.

    It holds no embedding: vLLM then shares the target's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shape = asdict(head.shape)
    layers = list(shape.pop("layers"))
    theta = shape.pop("rope_theta")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **shape,
        "num_hidden_layers": 1,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": layers,
            "use_aux_hidden_state": True,
        },
        "eagle_aux_hidden_state_layer_ids": layers,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    weights = {k: v.detach().bfloat16().contiguous() for k, v in head.state_dict().items()}
    weights["d2t"] = head.draft_tokens - torch.arange(len(head.draft_tokens))
    save_file(weights, directory / "model.safetensors.partial", metadata={"format": "pt"})
    (directory / "model.safetensors.partial").replace(directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
