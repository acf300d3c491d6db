"""`rejection_sample_method: "hierarchical"` with vLLM's own drafters."""

import pickle

import pytest
from support.eagle3_head import write_eagle3_head
from support.engines import run_engine
from support.stock_heads import write_mtp_target
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


@pytest.fixture(
    scope="module",
    params=["draft_model", "ngram", "eagle3"],
)
def stock(request, family, tmp_path_factory):
    """(drafter, results of JOBS) with block verification."""
    drafter = request.param
    drafters = {
        "draft_model": {"model": family.target, "draft_sample_method": "probabilistic"},
        "ngram": {"prompt_lookup_max": 3},
        "eagle3": {"model": None, "draft_sample_method": "probabilistic"},
    }
    keys = drafters[drafter]
    if drafter == "eagle3":
        keys["model"] = write_eagle3_head(family.target, tmp_path_factory.mktemp("eagle3"))
    speculative = {
        "method": drafter,
        "num_speculative_tokens": 4,
        "rejection_sample_method": "hierarchical",
        **keys,
    }
    return drafter, run_engine({"model": family.target, "speculative_config": speculative}, JOBS)


def test_greedy_equals_no_speculation(stock, plain):
    _, results = stock
    assert results["greedy"]["outputs"] == plain
    assert results["greedy with sampled"]["outputs"][1::2] == plain[1::2]


def test_drafts_are_verified_with_their_own_probabilities(stock):
    drafter, results = stock
    for job in ("greedy", "sampled", "temperature 1.3"):
        counters = results[job]["counters"]
        drafted = counters["spec_decode_num_draft_tokens"]
        assert drafted > 0
        if drafter == "draft_model":  # the target itself
            assert counters["spec_decode_num_accepted_tokens"] == drafted


def test_mtp_layers_alone_are_vllms_own_drafter(family, plain, tmp_path):
    """The target's copy of one more layer, which predicts a token ahead."""
    target = write_mtp_target(family.target, tmp_path / "mtp")
    config = {"method": "hsd", "num_speculative_tokens": 2, "levels": [{"mtp": {}}]}
    results = run_engine({"model": target, "speculative_config": config}, JOBS)
    assert results["greedy"]["outputs"] == plain
    assert results["greedy with sampled"]["outputs"][1::2] == plain[1::2]
    counters = results["greedy"]["counters"]
    assert counters["spec_decode_num_accepted_tokens"] > 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"method": "custom_class", "model": "a.B", "num_speculative_tokens": 2},
            "rejection_sample_method 'hierarchical' works with",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "levls": []},
            r"^vLLM refuses levls: [^\n]*\.$",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": -2},
            r"^vLLM refuses num_speculative_tokens: [^\n]*\.$",
        ),
    ],
)
def test_unsupported_drafters_are_refused(family, keys, message):
    register()
    with pytest.raises(UserError, match=message):
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
