"""Copies of Llama-architecture models with 8-bit weights, in the format of compressed-tensors."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.models.gguf import made_once

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT8 = {
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


def int8_copy(source: str | Path, out: str | Path | None = None) -> Path:
    """Write a copy with int8 weights by output channel, activations quantized by token at run time.

    Returns:
        `out` (default: next to the source), which is left as it is where it exists.
    """
    source = Path(source)
    out = out or source.with_name(f"{source.name}-int8")

    def quantized(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = value.abs().amax(1, keepdim=True) / 127
        rounded = (value / scale).round().to(torch.int8)
        return {f"{name}.weight": rounded, f"{name}.weight_scale": scale}

    return quantized_copy(source, out, quantized, INT8)


def quantized_copy(
    source: str | Path,
    out: str | Path,
    quantized: Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]],
    described: Mapping[str, Any] | None,
) -> Path:
    """Write a copy whose projections are replaced; `out` is left as it is where it exists.

    Args:
        quantized: (name, weight [outputs, inputs]) -> the tensors in its place.
        described: its `quantization_config`; None for none.
    """

    def make(part: Path) -> None:
        shutil.copytree(source, part)
        stored: dict[str, torch.Tensor] = {}
        for name, value in load_file(part / "model.safetensors").items():
            linear = name.endswith("_proj.weight")
            stored |= quantized(name.removesuffix(".weight"), value) if linear else {name: value}
        save_file(stored, part / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((part / "config.json").read_text())
        if described is not None:
            config["quantization_config"] = described
        (part / "config.json").write_text(json.dumps(config))

    return made_once(Path(out), make)
