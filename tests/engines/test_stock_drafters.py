"""`rejection_sample_method: "hierarchical"` with vLLM's own drafters."""

import pickle

import pytest
from support import cascades
from support.engines import run_engine
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_hsd.errors import UserError
from vllm_hsd.host.engine_hooks import NeedsHooks
from vllm_hsd.plugin import register

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(5 + 9 * i)] for i in range(8)]
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
JOBS = {
    "greedy": {"prompts": PROMPTS, "params": GREEDY},
    "greedy with sampled": {
        "prompts": PROMPTS,
        "params": [GREEDY if i % 2 else {**GREEDY, "temperature": 1, "seed": i} for i in range(8)],
    },
    "sampled": {"prompts": PROMPTS, "params": {**GREEDY, "temperature": 0.7}},
    "temperature 1.3": {"prompts": PROMPTS, "params": {**GREEDY, "temperature": 1.3}},
}


@pytest.fixture(scope="module")
def plain(family):
    return run_engine({"model": family.target}, {"greedy": JOBS["greedy"]})["greedy"]["outputs"]


@pytest.fixture(scope="module", params=["stock model, equal", "ngram", "stock head", "mtp"])
def stock(request, family):
    """(drafter, results of JOBS) with block verification; "mtp" is a level that drafts alone."""
    name = request.param
    if name == "ngram":
        config = cascades.stock("ngram", prompt_lookup_max=3)
    else:
        config = cascades.configuration(name, family)
    engine = {"model": cascades.target_of(name, family), "speculative_config": config}
    return name, run_engine(engine, JOBS)


def test_greedy_equals_no_speculation(stock, plain):
    _, results = stock
    assert results["greedy"]["outputs"] == plain
    assert results["greedy with sampled"]["outputs"][1::2] == plain[1::2]


def test_drafts_are_verified_with_their_own_probabilities(stock):
    drafter, results = stock
    for job in ("greedy", "sampled", "temperature 1.3"):
        counters = results[job]["counters"]
        drafted = counters["spec_decode_num_draft_tokens"]
        accepted = counters["spec_decode_num_accepted_tokens"]
        assert drafted > 0
        if drafter == "stock model, equal":  # the target itself
            assert accepted == drafted
        # The target's copy of one more layer, which predicts a token ahead.
        assert accepted > 0 or drafter != "mtp" or job != "greedy"


def test_a_number_that_vllm_refuses_is_named(family):
    register()
    keys = {"method": "ngram", "num_speculative_tokens": -2}
    said = r"^vLLM refuses num_speculative_tokens: [^\n]*\.$"
    with pytest.raises(UserError, match=said):
        configure(family, {**keys, "rejection_sample_method": "hierarchical"})


def configure(family, speculative_config: dict) -> VllmConfig:
    """vLLM's configuration for a speculative configuration."""
    return EngineArgs(
        model=family.target, skip_tokenizer_init=True, speculative_config=speculative_config
    ).create_engine_config()


def test_vllm_sees_its_own_block_verification(family):
    """Also in the processes that receive the configuration."""
    register()
    drafter = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    for method in ("standard", "block", "hierarchical"):
        config = configure(family, {**drafter, "rejection_sample_method": method})
        found = pickle.loads(pickle.dumps(config.speculative_config))
        assert found.rejection_sample_method == ("standard" if method == "standard" else "block")
        assert isinstance(found, NeedsHooks) == (method == "hierarchical")
