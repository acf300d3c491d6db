"""A tiny target with recurrent layers (a Granite 4 with Mamba-2), and a drafter without any."""

import importlib.util
from pathlib import Path
from unittest import mock

import torch
from support.architectures import COMMON
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
)

from vllm_hsd.tools.audit.mutants import replace

GRANITE = {**COMMON, "attention_multiplier": 0.17, "residual_multiplier": 0.5}
GRANITE["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
MAMBA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": COMMON["intermediate_size"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "position_embedding_type": "rope",
}


def write_recurrent_models(directory: Path) -> tuple[str, str]:
    """Paths of a random target and of a Granite that is it without its Mamba layers."""
    torch.manual_seed(0)
    target = GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**GRANITE, **MAMBA)).eval()
    drafter = GraniteForCausalLM(GraniteConfig(**GRANITE)).eval()
    with torch.no_grad():
        logits = target(torch.randint(2, 64, (4, 24))).logits
        target.lm_head.weight.mul_(3 / logits.std())
        weights = {}
        for name, value in target.state_dict().items():
            if name.endswith("mamba.out_proj.weight"):
                value.mul_(0.05)  # the larger, the worse the drafter
            if name.endswith("shared_mlp.input_linear.weight"):
                for part, rows in zip(("gate_proj", "up_proj"), value.chunk(2), strict=True):
                    weights[name.replace("shared_mlp.input_linear", f"mlp.{part}")] = rows
            weights[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = value
        own = drafter.state_dict()
        for name, value in own.items():
            # Its layers in the Mamba layers' places attend to nothing.
            value.copy_(weights.get(name, torch.zeros_like(value)))
    for name, model in (("target", target), ("drafter", drafter)):
        model.save_pretrained(directory / name)
    return str(directory / "target"), str(directory / "drafter")


def use_kernels() -> None:
    """A patch: Mamba-2 decodes as on a GPU; for CPUs it loses the state with rejected tokens."""
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops import ssu_dispatch

    from vllm_hsd.config import level_checks

    update = _for_gpus("mamba_ssm").selective_state_update

    class OfGpus(ssu_dispatch.TritonSSUBackend):
        def __init__(self, config):
            super().__init__(config)
            self._kernel = update

    for name in ssu_dispatch._BACKEND_REGISTRY:
        ssu_dispatch._BACKEND_REGISTRY[name] = OfGpus
    mamba_mixer2.causal_conv1d_update = _for_gpus("causal_conv1d").causal_conv1d_update
    level_checks.current_platform = mock.Mock(is_cpu=bool)


def _for_gpus(name: str):
    """A module of vLLM's kernels whose last lines have not replaced them by those for CPUs."""
    from vllm.platforms import current_platform

    spec = importlib.util.find_spec(f"vllm.model_executor.layers.mamba.ops.{name}")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(type(current_platform), "is_cpu", lambda self: False):
        spec.loader.exec_module(module)
    return module


def miscount() -> None:
    """The layers are told of one accepted token more: a negative control of `use_kernels`."""

    def wrong(after_sampling, self, idx_mapping, num_sampled, *rest):
        if torch.is_tensor(num_sampled):
            num_sampled = (num_sampled + 1).clamp(max=self.vllm_config.num_speculative_tokens + 1)
        after_sampling(self, idx_mapping, num_sampled, *rest)

    states = "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState"
    replace(f"{states}.postprocess_state", wrong)
