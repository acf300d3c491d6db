"""A random EAGLE-3 head for a tiny target, in the checkpoint layout that vLLM loads."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_eagle3_head(target: str, directory: Path) -> str:
    """Write the head and return its directory."""
    config = json.loads(Path(target, "config.json").read_text())
    hidden, middle, size = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.mlp.gate_proj": (middle, hidden),
        "midlayer.mlp.up_proj": (middle, hidden),
        "midlayer.mlp.down_proj": (hidden, middle),
        "fc": (hidden, 3 * hidden),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    torch.manual_seed(0)
    weights = {f"{name}.weight": 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    weights |= {f"midlayer.{norm}.weight": torch.ones(hidden) for norm in norms}
    weights["norm.weight"] = torch.ones(hidden)
    weights["lm_head.weight"] = load_file(f"{target}/model.safetensors")["lm_head.weight"]
    save_file(weights, directory / "model.safetensors")
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": size,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)
