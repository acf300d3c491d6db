"""Models with 8-bit weights in the format of compressed-tensors."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
        }
    },
}


def write_int8(source: str, directory: Path) -> str:
    """A copy with int8 weights by output channel, activations quantized by token at run time."""
    shutil.copytree(source, directory)
    weights = load_file(directory / "model.safetensors")
    stored = {}
    for name, value in weights.items():
        if not name.endswith("_proj.weight"):
            stored[name] = value
            continue
        scale = value.abs().amax(1, keepdim=True) / 127
        stored[name] = (value / scale).round().to(torch.int8)
        stored[name.replace(".weight", ".weight_scale")] = scale
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)
