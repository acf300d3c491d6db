"""Log-probabilities of sampled tokens against the exact distribution, in each of vLLM's modes."""

import numpy as np
import pytest
import torch
from support.engines import run_engine
from support.exact_joint_distribution import next_token_distribution
from transformers import AutoModelForCausalLM

PROMPTS = [[2, 3, 0], [3], [4, 2], [0, 1, 3, 3], [4, 4], [1, 2]]
PARAMS = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.9},
    {"top_k": 3, "presence_penalty": 0.6},
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"logit_bias": {2: 1.5}, "min_p": 0.05},
]
MODES = ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


def expected_row(mode: str, logits: np.ndarray, prompt, output, params) -> np.ndarray:
    """[V]: values that a mode reports, -inf for masked tokens."""
    if mode == "raw_logits":
        return logits
    if mode == "raw_logprobs":
        return logits - np.log(np.exp(logits).sum())
    greedy = params.get("temperature") == 0
    with np.errstate(divide="ignore"):
        # For a greedy request vLLM reports the distribution at temperature 1.
        return np.log(
            next_token_distribution(
                logits, prompt, output, {**params, **({"temperature": 1} if greedy else {})}, None
            )
        )


@pytest.mark.parametrize("mode", MODES)
def test_values_and_ranks(small_vocabulary, mode):
    engine = {
        "model": small_vocabulary.target,
        "logprobs_mode": mode,
        "speculative_config": {
            "method": "hsd",
            "num_speculative_tokens": 4,
            "levels": [
                {"model": small_vocabulary.small, "num_tokens": 2},
                {"model": small_vocabulary.mid},
            ],
        },
    }
    shared = {"max_tokens": 16, "ignore_eos": True, "logprobs": 2, "seed": 3}
    job = {"prompts": PROMPTS, "params": [{**shared, **params} for params in PARAMS]}
    outputs = run_engine(engine, {"job": job})["job"]["outputs"]
    network = AutoModelForCausalLM.from_pretrained(small_vocabulary.target, dtype=torch.float64)
    for prompt, params, [output] in zip(PROMPTS, PARAMS, outputs, strict=True):
        ids = output["ids"]
        assert len(ids) == len(output["logprobs"]) == 16
        with torch.inference_mode():
            rows = network(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 :].numpy()
        for t, found in enumerate(output["logprobs"]):
            expected = expected_row(mode, rows[t], prompt, tuple(ids[:t]), params)
            if mode == "processed_logits":
                # Known up to a constant, which the softmax removes.
                best = int(expected.argmax())
                if best in found:
                    expected = expected + found[best][0] - expected[best]
            assert ids[t] in found and 2 <= len(found) <= 3
            for token, (value, rank) in found.items():
                assert value == pytest.approx(expected[token], abs=1e-3)
                assert rank == 1 + (expected > expected[token] + 1e-9).sum()
