"""Cascades on the V2 runner, whole engines, interpreted."""

import pytest

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


@pytest.mark.parametrize(
    "name",
    [
        "two models",
        pytest.param("three equal", marks=pytest.mark.slow),
        pytest.param("lookup, exit, model", marks=pytest.mark.slow),
    ],
)
def test_greedy_text_is_that_of_no_speculation(name, family, greedy_tokens):
    from support.v2_engines import run_greedy_and_mixed

    mixed = run_greedy_and_mixed(family.target, configuration(name, family), greedy_tokens)
    assert mixed["counters"]["spec_decode_num_accepted_tokens"] > 0
