"""Stacks of every kind of level inside vLLM: laws, greedy equality, and that each key acts."""

import numpy as np
import pytest
from runner_v1.engine_process import run_engine
from runner_v1.test_law import CASES, ERROR, p_values, sampled

from vllm_hsd.levels.bigram import count_bigrams, write_bigram

PROMPTS = [[(3 * i + j * j) % 5 for j in range(4 + 6 * i)] for i in range(8)]
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
COMPARED = ("temperature 0.7", "top_p", "greedy")

STACKS = {
    "ngram": lambda family, bigram: [
        {"ngram": {"max": 3}, "num_tokens": 3},
        {"model": family.mid},
    ],
    "bigram": lambda family, bigram: [
        {"bigram": bigram, "num_tokens": 2},
        {"model": family.small, "num_tokens": 3},
        {"model": family.mid},
    ],
    "early_exit": lambda family, bigram: [{"early_exit": 1}],
    "two early exits": lambda family, bigram: [
        {"early_exit": 1, "num_tokens": 2},
        {"early_exit": 2},
    ],
    "entropy windows": lambda family, bigram: [
        {"bigram": bigram, "num_tokens": 3, "window": "entropy"},
        {"model": family.small, "num_tokens": 4, "window": "entropy"},
        {"model": family.mid, "window": "entropy"},
    ],
}


@pytest.fixture(scope="module")
def bigram(tmp_path_factory):
    """A table counted on random text over the vocabulary of five."""
    path = str(tmp_path_factory.mktemp("bigram") / "table.npz")
    text = np.random.default_rng(0).integers(0, 5, 500)
    write_bigram(count_bigrams([text], vocab_size=5), path)
    return path


def hsd(levels: list[dict], **keys) -> dict:
    cascade = {"method": "hsd", "num_speculative_tokens": 5, "levels": levels, **keys}
    return {"speculative_config": cascade}


@pytest.mark.parametrize(
    "count", [600, pytest.param(20000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
)
@pytest.mark.parametrize("stack", STACKS)
def test_joint_law(small_vocabulary, bigram, stack, count):
    levels = STACKS[stack](small_vocabulary, bigram)
    engine = {"model": small_vocabulary.target, **hsd(levels)}
    outputs, result = sampled(engine, count, {name: CASES[name] for name in COMPARED})
    assert all(level["drafted"] > 0 for level in result["levels"])
    found = p_values(small_vocabulary.target, outputs)
    assert min(found.values()) > ERROR, found


@pytest.fixture(scope="module")
def plain(small_vocabulary):
    engine = {"model": small_vocabulary.target}
    job = {"prompts": PROMPTS, "params": GREEDY}
    return run_engine(engine, {"greedy": job})["greedy"]["outputs"]


@pytest.mark.parametrize("stack", STACKS)
def test_greedy_equals_no_speculation(small_vocabulary, bigram, plain, stack):
    levels = STACKS[stack](small_vocabulary, bigram)
    job = {"prompts": PROMPTS, "params": GREEDY}
    result = run_engine({"model": small_vocabulary.target, **hsd(levels)}, {"greedy": job})
    assert result["greedy"]["outputs"] == plain


def rates(engine: dict) -> list[float]:
    """Accepted share of what each level drafted, at temperature 1."""
    job = {"prompts": PROMPTS, "params": {**GREEDY, "temperature": 1, "seed": 1}}
    levels = run_engine(engine, {"job": job})["job"]["levels"]
    return [level["accepted"] / level["drafted"] for level in levels]


def test_an_exit_behind_every_layer_accepts_everything(small_vocabulary):
    engine = {"model": small_vocabulary.target}
    assert rates({**engine, **hsd([{"early_exit": 2}])}) == [1.0]


def test_windows_and_temperatures_act(small_vocabulary):
    """An entropy window wastes fewer tokens than a fixed one; a wrong temperature wastes more."""
    engine, drafter = {"model": small_vocabulary.target}, {"model": small_vocabulary.small}
    fixed = rates({**engine, **hsd([drafter])})[0]
    assert rates({**engine, **hsd([{**drafter, "window": "entropy"}])})[0] > fixed
    assert rates({**engine, **hsd([{**drafter, "temperature_scale": 3.0}])})[0] < fixed
