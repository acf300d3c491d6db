"""min_p and logit_bias under our verifier, whatever other plugins have wrapped."""

import pytest
from support.cascades import stock
from support.engines import ids, run_engine
from support.level_files import cascade
from support.other_vllm import FAVORED

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(5 + 9 * i)] for i in range(8)]
PARAMS = {
    "greedy": {"temperature": 0},
    # Only the most likely token is left, so that sampling is greedy.
    "min_p": {"min_p": 1.0},
    "logit_bias": {"logit_bias": {FAVORED: 100.0}},
    "min_tokens": {"temperature": 0, "logit_bias": {1: 90.0}, "min_tokens": 9},
}
JOBS = {
    name: {"prompts": PROMPTS, "params": {"max_tokens": 20, **params}}
    for name, params in PARAMS.items()
}


@pytest.fixture(params=["cascade", "stock drafter"])
def engine(request, family) -> dict:
    levels = {"model": family.small, "num_tokens": 2}, {"model": family.mid}
    stocks = {"speculative_config": stock("ngram", prompt_lookup_max=2)}
    drafts = cascade(*levels) if request.param == "cascade" else stocks
    return {"model": family.target, **drafts}


@pytest.mark.parametrize("before", ["", "vllm_hsd.plugin:register vllm_hsd.host.hooks:install"])
def test_sampling_parameters_are_applied(engine, before):
    """Of another plugin that is loaded before ours or after it."""
    results = run_engine(engine, JOBS, patch=f"{before} support.other_vllm:wrap")
    assert ids(results["min_p"]) == ids(results["greedy"])
    assert ids(results["logit_bias"]) == [[FAVORED] * 20] * len(PROMPTS)
    assert all(len(text) == 10 for text in ids(results["min_tokens"]))


def test_logits_processors_of_others_are_applied(engine):
    arguments = {**engine, "logits_processors": ["support.other_vllm:Favors"]}
    found = run_engine(arguments, {"greedy": JOBS["greedy"]})["greedy"]
    assert ids(found) == [[FAVORED] * 20] * len(PROMPTS)
