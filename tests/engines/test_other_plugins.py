"""min_p and logit_bias under our verifier, whatever other plugins have wrapped."""

import pytest
from support.cascades import stock
from support.engines import ids, run_engine
from support.level_files import cascade
from support.other_vllm import FAVORED

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(5 + 9 * i)] for i in range(8)]
JOBS = {
    "greedy": {"prompts": PROMPTS, "params": {"temperature": 0, "max_tokens": 20}},
    # Only the most likely token is left, so that sampling is greedy.
    "min_p": {"prompts": PROMPTS, "params": {"temperature": 1, "min_p": 1.0, "max_tokens": 20}},
    "logit_bias": {
        "prompts": PROMPTS,
        "params": {"temperature": 1, "logit_bias": {FAVORED: 100.0}, "max_tokens": 20},
    },
    "min_tokens": {
        "prompts": PROMPTS,
        "params": {"temperature": 0, "logit_bias": {1: 90.0}, "min_tokens": 9, "max_tokens": 20},
    },
}


def engine(family) -> dict:
    levels = {"model": family.small, "num_tokens": 2}, {"model": family.mid}
    return {"model": family.target, **cascade(*levels)}


def stock_drafter(family) -> dict:
    return {**engine(family), "speculative_config": stock("ngram", prompt_lookup_max=2)}


@pytest.mark.parametrize("made", [engine, stock_drafter])
@pytest.mark.parametrize("patch", ["wrapped_before", "wrapped_after"])
def test_sampling_parameters_are_applied(family, made, patch):
    results = run_engine(made(family), JOBS, patch=f"support.other_vllm:{patch}")
    assert ids(results["min_p"]) == ids(results["greedy"])
    assert ids(results["logit_bias"]) == [[FAVORED] * 20] * len(PROMPTS)
    assert all(len(text) == 10 for text in ids(results["min_tokens"]))


@pytest.mark.parametrize("made", [engine, stock_drafter])
def test_logits_processors_of_others_are_applied(family, made):
    arguments = {**made(family), "logits_processors": ["support.other_vllm:Favors"]}
    found = run_engine(arguments, {"greedy": JOBS["greedy"]})["greedy"]
    assert ids(found) == [[FAVORED] * 20] * len(PROMPTS)
