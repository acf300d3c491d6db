"""Cascades on the V2 runner, whole engines, interpreted."""

import pytest
from support import engines

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(3 + 9 * i)] for i in range(4)]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
JOBS = {
    "greedy": {"prompts": PROMPTS, "params": GREEDY},
    "mixed": {
        "prompts": PROMPTS,
        "params": [
            GREEDY,
            {**GREEDY, "temperature": 0.7, "logprobs": 2},
            {**GREEDY, "temperature": 1},
            {**GREEDY, "temperature": 1.3},
        ],
    },
    "joining": {"prompts": PROMPTS, "params": GREEDY, "arrive": [0, 2, 3, 5]},
}
pytestmark = [pytest.mark.interpret, pytest.mark.timeout(900)]


def cascade(levels: list[dict], tokens: int = 4) -> dict:
    return {"method": "hsd", "num_speculative_tokens": tokens, "levels": levels}


def configuration(name: str, family) -> dict:
    return {
        "two models": cascade([{"model": family.small, "num_tokens": 1}, {"model": family.mid}]),
        "three equal": cascade(
            [
                {"model": family.target, "num_tokens": 1},
                {"model": family.target, "num_tokens": 2},
                {"model": family.target},
            ],
            5,
        ),
        "lookup, exit, model": cascade(
            [
                {"ngram": {"max": 3}, "num_tokens": 1},
                {"early_exit": 1, "num_tokens": 2},
                {"model": family.mid},
            ],
            5,
        ),
    }[name]


@pytest.fixture(scope="module")
def plain(family):
    """Tokens without speculation, on the V1 runner."""
    jobs = {"greedy": JOBS["greedy"]}
    found = engines.run_engine({"model": family.target}, jobs)["greedy"]["outputs"]
    return [output[0]["ids"] for output in found]


@pytest.mark.parametrize(
    "name",
    [
        "two models",
        pytest.param("three equal", marks=pytest.mark.slow),
        pytest.param("lookup, exit, model", marks=pytest.mark.slow),
    ],
)
def test_greedy_text_is_that_of_no_speculation(name, family, plain):
    from support.v2_engines import run_engine

    # Prompts are prefilled in chunks of at most 24 tokens.
    engine = {"model": family.target, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    results = run_engine({**engine, "speculative_config": configuration(name, family)}, JOBS)
    for job in ("greedy", "joining"):
        assert [output[0]["ids"] for output in results[job]["outputs"]] == plain
    assert results["mixed"]["outputs"][0][0]["ids"] == plain[0]
    counters = results["mixed"]["counters"]
    assert counters["spec_decode_num_accepted_tokens"] > 0
