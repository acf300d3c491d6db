"""A tiny target with multi-dimensional positions (M-RoPE), as Qwen's vision models have them."""

import json
from pathlib import Path

import torch
from support.architectures import write_models
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.registry import ModelRegistry

from vllm_hsd.tools.audit.mutants import replace

NAME = "MropeQwen2ForCausalLM"
IMAGE_TOKENS = 4


class MropeQwen2(Qwen2ForCausalLM, SupportsMRoPE):
    """Texts begin with an image: fewer positions than tokens, other ones in each dimension."""

    def get_mrope_input_positions(self, input_tokens, mm_features):
        index = torch.arange(len(input_tokens))
        image, behind = index[:IMAGE_TOKENS], index[IMAGE_TOKENS:]
        positions = torch.stack([image // 2, image // 3, image // 4])
        delta = int(positions.max()) + 1 - len(image)
        return torch.cat((positions, (behind + delta).expand(3, -1)), 1), delta


def register() -> None:
    """Make vLLM know the target; called in the process of an engine."""
    ModelRegistry.register_model(NAME, MropeQwen2)


def write_mrope_models(directory: Path) -> tuple[str, str]:
    """Paths of a random target with M-RoPE and of a drafter near it, with plain positions."""
    target, drafter = write_models("Qwen2", directory)
    path = Path(target) / "config.json"
    config = json.loads(path.read_text())
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    sections = {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    config["rope_parameters"] = {**config["rope_parameters"], **sections}
    path.write_text(json.dumps({**config, "architectures": [NAME]}))
    return target, drafter


def forget_offsets() -> None:
    """Tokens after the prompt are computed where a text without image would have them."""

    def wrong(whole, self, req_idx, *rest, **named):
        whole(self, req_idx, *rest, **named)
        self.prefill_delta.np[req_idx] = 0

    replace("vllm.v1.worker.gpu.mm.rope:RopeState.init_prefill_positions", wrong)
