"""Tiny checkpoints for vLLM's own EAGLE and MTP, random but for what they share with a target."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_eagle_head(target: str, directory: Path) -> str:
    """The first layer of a Llama target with a random projection in front; returns `directory`."""
    config, weights = _read(target)
    hidden = config["hidden_size"]
    prefix = "model.layers.0."
    head = {
        f"layers.0.{name.removeprefix(prefix)}": value
        for name, value in weights.items()
        if name.startswith(prefix) and "input_layernorm" not in name
    }
    torch.manual_seed(0)
    head["fc.weight"] = torch.cat([torch.eye(hidden), 0.1 * torch.randn(hidden, hidden)], 1)
    return _write(directory, config | {"num_hidden_layers": 1}, head)


def write_mtp_target(target: str, directory: Path) -> str:
    """A copy of a Llama target as a MiMo (a Qwen2 with one layer that predicts a token ahead)."""
    config, weights = _read(target)
    hidden, eps = config["hidden_size"], config["rms_norm_eps"]
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept += ("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "dtype")
    described = {
        **{key: config[key] for key in kept},
        "model_type": "qwen2",
        "architectures": ["MiMoForCausalLM"],
        "rms_norm_eps": eps,
        "tie_word_embeddings": False,
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "num_nextn_predict_layers": 1,
    }
    layers = range(config["num_hidden_layers"])
    torch.manual_seed(0)
    for layer in layers:
        for name in ("q", "k", "v"):  # Qwen2 has biases
            attention = f"model.layers.{layer}.self_attn.{name}_proj"
            weights[f"{attention}.bias"] = torch.zeros(len(weights[f"{attention}.weight"]))
    prefix = "model.layers.0."
    for name, value in [each for each in weights.items() if each[0].startswith(prefix)]:
        weights[f"model.mtp_layers.0.{name.removeprefix(prefix)}"] = value.clone()
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"model.mtp_layers.0.{norm}.weight"] = torch.ones(hidden)
    projection = torch.cat([0.1 * torch.randn(hidden, hidden), torch.eye(hidden)], 1)
    weights["model.mtp_layers.0.input_proj.weight"] = projection
    return _write(directory, described, weights)


def _read(model: str) -> tuple[dict, dict[str, torch.Tensor]]:
    config = json.loads(Path(model, "config.json").read_text())
    return config, load_file(f"{model}/model.safetensors")


def _write(directory: Path, config: dict, weights: dict[str, torch.Tensor]) -> str:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)
