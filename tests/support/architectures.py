"""Tiny random models of the architectures that people serve."""

from pathlib import Path

import torch
import transformers

from vllm_hsd.tools.audit.tiny_models import CONFIG

COMMON = {**CONFIG, "vocab_size": 64, "num_hidden_layers": 3}
# Name in transformers, without "Config" -> keys of its configuration.
ARCHITECTURES = {
    "Gemma2": {
        "tie_word_embeddings": True,
        "sliding_window": 16,
        "query_pre_attn_scalar": 32,
        "final_logit_softcapping": 5.0,
        "attn_logit_softcapping": 10.0,
    },
    "Gemma3Text": {
        "tie_word_embeddings": True,
        "sliding_window": 16,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.0,
    },
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmo2": {},
    "Phi3": {},
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}


def write_models(name: str, directory: Path) -> tuple[str, str]:
    """Paths of a random target and of a drafter near it; name: a key of ARCHITECTURES."""
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **ARCHITECTURES[name]})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        logits = model(torch.randint(2, 64, (4, 24))).logits
        if config.tie_word_embeddings:
            # It expects its last token once more, and is not to be sure of it. Gemma's norms
            # multiply by 1 + weight.
            model.model.norm.weight.fill_(min(3 / logits.amax(-1).mean().item(), 1.0) - 1)
        else:
            model.lm_head.weight.mul_(3 / logits.std())
    target, drafter = directory / "target", directory / "drafter"
    model.save_pretrained(target)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * value.std(unbiased=False) * torch.randn_like(value))
    model.save_pretrained(drafter)
    return str(target), str(drafter)
