"""Whisper as the target, whose tables of blocks are of what its encoder read, too."""

import numpy as np
import pytest
import torch
import transformers
from support.engines import GREEDY, run_engine

from vllm_hsd.tools.audit.tiny_models import byte_tokenizer

LOOKUPS = {"sources": [{"ngram": {"max": 3}}, {"suffix": {}}]}


@pytest.fixture(scope="module")
def whisper(tmp_path_factory) -> str:
    """Small, random, and with answers that depend on what it hears."""
    directory = tmp_path_factory.mktemp("whisper")
    sizes = {"d_model": 128, "num_mel_bins": 80, "max_source_positions": 100, "vocab_size": 320}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 128}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    none = {"suppress_tokens": None, "begin_suppress_tokens": None}
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**sizes, **tokens, **none)
    )
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() > 1 and "embed" not in name:
                value.mul_(12 if "encoder_attn" in name else 8)
            elif "decoder.embed_positions" in name:
                value.mul_(10)
    model.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(directory)
    features = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=2)
    transformers.WhisperProcessor(features, byte_tokenizer()).save_pretrained(directory)
    return str(directory)


def test_greedy_texts_are_those_of_no_speculation(whisper):
    rng = np.random.default_rng(0)
    prompts = [
        {
            "encoder_prompt": {
                "prompt": "",
                "multi_modal_data": {"audio": (np.float32(rng.normal(size=32000)), 16000)},
            },
            "decoder_prompt": {"prompt_token_ids": [3, *[10 + i, 11, 12] * i]},
        }
        for i in range(5)
    ]
    jobs = {"": {"prompts": prompts, "params": {**GREEDY, "max_tokens": 60}}}
    engine = {"model": whisper, "max_model_len": 448, "skip_tokenizer_init": False}
    engine |= {"max_num_seqs": 20, "block_size": 32}
    config = {"method": "hsd", "num_speculative_tokens": 5, "levels": [LOOKUPS], "adaptive": False}
    plain = run_engine(engine, jobs)[""]
    found = run_engine({**engine, "speculative_config": config}, jobs)[""]
    assert found["outputs"] == plain["outputs"]
    assert found["counters"]["spec_decode_num_accepted_tokens"] > 20
