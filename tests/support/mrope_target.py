"""A tiny target with multi-dimensional positions (M-RoPE), as Qwen's vision models have them."""

import json
from pathlib import Path

import torch
from support.architectures import write_models
from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.registry import ModelRegistry

NAME = "MropeQwen2ForCausalLM"


class MropeQwen2(Qwen2ForCausalLM, SupportsMRoPE):
    """Prompts take fewer positions than tokens, other ones in each dimension, as images do."""

    def get_mrope_input_positions(self, input_tokens, mm_features):
        index = torch.arange(len(input_tokens))
        positions = torch.stack([index // 2, index // 3, index // 4])
        return positions, int(positions.max()) + 1 - len(index)


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


def register_without_offsets() -> None:
    """As `register`, but drafts are verified where tokens of one position each would be."""
    register()
    of_text = MRotaryEmbedding.get_next_input_positions_tensor

    def wrong(out, out_offset, mrope_position_delta, context_len, num_new_tokens):
        delta = mrope_position_delta if num_new_tokens == 1 else 0
        of_text(out, out_offset, delta, context_len, num_new_tokens)

    MRotaryEmbedding.get_next_input_positions_tensor = staticmethod(wrong)
