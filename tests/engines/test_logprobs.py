"""Log-probabilities of sampled tokens against the exact distribution, in each of vLLM's modes."""

import numpy as np
import pytest
import torch
from support.engines import run_engine
from support.exact_joint_distribution import next_token_distribution
from support.level_files import cascade
from support.marks import slow
from transformers import AutoModelForCausalLM

PROMPTS = [[2, 3, 0], [3], [4, 2], [0, 1, 3, 3], [4, 4], [1, 2]]
PARAMS = [
    {"temperature": 0.7},
    # Where top_p needs every token, vLLM's kernel leaves one out (docs/lossless.md).
    {"temperature": 1.3, "top_p": 0.7},
    {"top_k": 3, "presence_penalty": 0.6},
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"logit_bias": {2: 1.5}, "min_p": 0.05},
]
# Requests that list the tokens, among others in one batch, which vLLM's own speculation dies of.
LISTED = [
    {"logprob_token_ids": [4, 1]},
    {"logprobs": 1},
    {"logprob_token_ids": [0, 1, 2, 3], "temperature": 0},
    {},
    {"logprobs": 2, "logprob_token_ids": [3, 0], "temperature": 0.7},
]
ALONE = {"top_k": 1, "logprobs": 2}
MODES = ["raw_logprobs", "processed_logits", *slow("processed_logprobs", "raw_logits")]
# In which vLLM verifies a batch in parts, as large ones.
IN_PARTS = "processed_logits", "raw_logits"


def expected_row(mode: str, logits: np.ndarray, prompt, output, params) -> np.ndarray:
    """[V]: values that a mode reports, -inf for masked tokens."""
    if mode == "raw_logits":
        return logits
    if mode == "raw_logprobs":
        return logits - np.log(np.exp(logits).sum())
    # For a greedy request vLLM reports the distribution at temperature 1.
    params = {**params, "temperature": params.get("temperature") or 1}
    with np.errstate(divide="ignore"):
        return np.log(next_token_distribution(logits, prompt, output, params, None))


@pytest.fixture(scope="module", params=MODES)
def mode(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def results(small_vocabulary, mode) -> dict:
    levels = {"model": small_vocabulary.small, "num_tokens": 2}, {"model": small_vocabulary.mid}
    engine = {"model": small_vocabulary.target, "logprobs_mode": mode, **cascade(*levels)}
    shared = {"max_tokens": 16, "ignore_eos": True, "seed": 3}
    likely = [{**shared, "logprobs": 2, **params} for params in PARAMS]
    listed = [{**shared, **params} for params in LISTED]
    jobs = {
        "likely": {"prompts": PROMPTS, "params": likely},
        "listed": {"prompts": PROMPTS[: len(LISTED)], "params": listed},
        # No other request has vLLM process the batch.
        "alone": {"prompts": PROMPTS[:1], "params": {**shared, **ALONE}},
    }
    patch = "support.sampling_cases:verify_in_parts" if mode in IN_PARTS else None
    found = run_engine(engine, jobs, patch=patch)
    return {name: result["outputs"] for name, result in found.items()}


@pytest.fixture(scope="module")
def network(small_vocabulary):
    return AutoModelForCausalLM.from_pretrained(small_vocabulary.target, dtype=torch.float64)


def checked_rows(network, mode: str, prompt: list[int], output: dict, params: dict):
    """(sampled token, [V] expected values, {token: (value, rank)} found), which are asserted."""
    ids = output["ids"]
    assert len(ids) == len(output["logprobs"]) == 16
    with torch.inference_mode():
        rows = network(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 :].numpy()
    for t, found in enumerate(output["logprobs"]):
        expected = expected_row(mode, rows[t], prompt, tuple(ids[:t]), params)
        if mode == "processed_logits":
            # Known up to a constant, which the softmax removes.
            known = [token for token in found if np.isfinite(expected[token])]
            best = max(known, key=lambda token: expected[token])
            expected = expected + found[best][0] - expected[best]
        for token, (value, _) in found.items():
            assert value == pytest.approx(expected[token], abs=1e-3)
        yield ids[t], expected, found


def test_values_and_ranks(network, mode, results):
    for prompt, params, [output] in zip(PROMPTS, PARAMS, results["likely"], strict=True):
        for sampled, expected, found in checked_rows(network, mode, prompt, output, params):
            assert sampled in found and 2 <= len(found) <= 3
            for token, (_, rank) in found.items():
                assert rank == 1 + (expected > expected[token] + 1e-9).sum()


def test_values_of_a_request_alone(network, mode, results):
    ((output,),) = results["alone"]
    assert all(found for *_, found in checked_rows(network, mode, PROMPTS[0], output, ALONE))


def test_listed_tokens(network, mode, results):
    for prompt, params, [output] in zip(PROMPTS, LISTED, results["listed"], strict=False):
        if "logprob_token_ids" not in params:
            assert (output["logprobs"] is None) == ("logprobs" not in params)
            continue
        for sampled, _, found in checked_rows(network, mode, prompt, output, params):
            assert set(found) == {sampled, *params["logprob_token_ids"]}


def test_listed_tokens_where_lookups_draft(small_vocabulary, network):
    """A request that lists tokens has no branches, whose rows are not those of its chain."""
    levels = {"sources": [{"ngram": {"max": 3}}, {"suffix": {}}], "branches": 3}
    engine = {"model": small_vocabulary.target, "block_size": 32, **cascade(levels)}
    params = {"max_tokens": 16, "ignore_eos": True, "seed": 3, "logprob_token_ids": [4, 1]}
    (result,) = run_engine(engine, {"listed": {"prompts": PROMPTS, "params": params}}).values()
    assert result["counters"]["spec_decode_num_accepted_tokens"] > 0
    for prompt, [output] in zip(PROMPTS, result["outputs"], strict=True):
        assert all(
            found for *_, found in checked_rows(network, "raw_logprobs", prompt, output, params)
        )
