"""LoRA adapters with random weights for the tiny models, in the layout that PEFT writes."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from vllm_hsd.tools.audit.mutants import replace

RANK = 4
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def write_adapter(directory: Path, model: str, seed: int) -> str:
    """Write an adapter, whose changes to weights are as large as their standard deviations."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, weight in load_file(f"{model}/model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in TARGETS:
            rows, columns = weight.shape
            down = torch.randn(RANK, columns, generator=generator)
            up = torch.randn(rows, RANK, generator=generator)
            scale = weight.std() / RANK**0.5
            weights[f"base_model.model.{layer}.lora_A.weight"] = down
            weights[f"base_model.model.{layer}.lora_B.weight"] = up * scale
    directory.mkdir(parents=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": model,
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


def install_neighbours() -> None:
    """Give steps with several tokens of a request the adapter of the next one in the batch."""

    def made(make, self, req_ids, idx_mapping, num_scheduled_tokens):
        several = bool((num_scheduled_tokens > 1).any())
        return make(self, req_ids, np.roll(idx_mapping, several), num_scheduled_tokens)

    replace("vllm.v1.worker.gpu.lora_utils:LoraState.make_lora_inputs", made)
