"""Random Llama models, built in milliseconds, whose distributions overlap.

A drafter is its target with noise on every weight: more noise, fewer accepted tokens. This
exercises every branch of the verifier, which independent random models do not.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = 1
NOISE = {"target": 0.0, "mid": 0.03, "small": 0.06}


@dataclass(frozen=True)
class Family:
    """Directories of a target and its drafters, and their vocabulary size."""

    target: str
    mid: str
    small: str
    vocabulary: int


CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def tiny_llama(vocabulary: int, seed: int = 0, **changes) -> LlamaForCausalLM:
    """A model with random weights; `changes` are keys of its configuration."""
    torch.manual_seed(seed)
    config = {**CONFIG, "vocab_size": vocabulary, **changes}
    return LlamaForCausalLM(LlamaConfig(**config)).eval()


def build_family(directory: Path, vocabulary: int, peak: float, **changes) -> Family:
    """Write a target and two drafters.

    Args:
        peak: standard deviation of the target's logits.
        changes: keys of their configuration.
    """
    model = tiny_llama(vocabulary, **changes)
    with torch.no_grad():
        logits = model(torch.randint(0, vocabulary, (8, 32))).logits
        model.lm_head.weight.mul_(peak / logits.std())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    paths = {}
    for name, noise in NOISE.items():
        noisy = {
            key: value + noise * value.std(unbiased=False) * torch.randn_like(value)
            for key, value in weights.items()
        }
        model.load_state_dict(noisy)
        paths[name] = str(directory / name)
        model.save_pretrained(paths[name])
    return Family(**paths, vocabulary=vocabulary)


def byte_tokenizer(letters: str = "") -> PreTrainedTokenizerFast:
    """One token per byte: "<s>" is 0, "</s>" is EOS, "<unk>" is 2, then all bytes or `letters`."""
    alphabet = sorted(letters or pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
