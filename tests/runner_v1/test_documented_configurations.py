"""Every speculative configuration shown in the README and in docs/ starts an engine."""

import copy

import pytest
from support.documented_configurations import documented_configurations, with_tiny_models
from support.engines import run_engine
from support.suffix_extra import needs_suffix

CONFIGURATIONS = documented_configurations()
GREEDY = {
    "prompts": [[(7 * i + j * j) % 60 + 2 for j in range(5 + 9 * i)] for i in range(4)],
    "params": {"temperature": 0, "max_tokens": 24, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def plain(family) -> list:
    return run_engine({"model": family.target}, {"greedy": GREEDY})["greedy"]["outputs"]


def test_the_readme_shows_a_cascade_and_block_verification():
    shown = [config for name, config in CONFIGURATIONS.items() if name.startswith("README.md")]
    assert any(config["method"] == "hsd" for config in shown)
    assert any("rejection_sample_method" in config for config in shown)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_suffix) if "'suffix'" in str(config["levels"]) else name
        for name, config in CONFIGURATIONS.items()
        if "levels" in config
    ]
    + [name for name, config in CONFIGURATIONS.items() if "levels" not in config],
)
def test_it_serves_greedy_requests_as_no_speculation_does(family, plain, name, tmp_path):
    config = with_tiny_models(copy.deepcopy(CONFIGURATIONS[name]), family, tmp_path)
    engine = {"model": family.target, "speculative_config": config}
    assert run_engine(engine, {"greedy": GREEDY})["greedy"]["outputs"] == plain
