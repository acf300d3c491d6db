"""Cascades on the V2 runner's sampling side, with tables in the place of models."""

import itertools

import pytest
from support.exact_joint_distribution import chi_square_p_value
from support.table_distributions import joint, table, tables

pytestmark = pytest.mark.interpret


def cascade(name: str) -> dict:
    target, draft = tables()
    middle = target + 0.4 * table(2, len(target), 1.0)
    levels = {
        "one": [{"model": draft}],
        "two": [{"model": draft, "num_tokens": 1}, {"model": middle}],
        "three": [
            {"model": draft, "num_tokens": 1},
            {"model": middle, "num_tokens": 2},
            {"model": target + 0.3 * table(3, len(target), 1.0)},
        ],
        "lookup": [{"ngram": {"max": 2}, "num_tokens": 1}, {"model": middle}],
        "equal": [{"model": target, "num_tokens": 1}, {"model": target}],
    }[name]
    return {"num_speculative_tokens": 4, "levels": levels}


def runner(params, name, **options):
    from support.table_runner import TableRunner

    target, draft = tables()
    # As long as the widest window of a cascade, so that the first step drafts.
    return TableRunner(
        target, draft, params, length=4, prompt_length=4, cascade=cascade(name), **options
    )


@pytest.mark.parametrize("name", ["one", "two", "three", "lookup"])
def test_greedy_text_is_the_targets(name):
    target, _ = tables()
    served = runner([{"temperature": 0.0}] * 3, name)
    for _ in range(4):
        served.step()
    for text in served.texts():
        for before, after in itertools.pairwise(text[3:]):
            assert after == int(target[before].argmax())
    assert served.accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_levels_equal_to_the_target_lose_nothing(temperature):
    served = runner([{"temperature": temperature}] * 3, "equal")
    for _ in range(4):
        served.step()
    drafted = int(served.drafter.state.counts[0, 0])
    assert int(served.drafter.state.counts[0, 1]) == drafted > 0
    assert served.accepted == served.verified > 0


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("name", "params"),
    [("two", {}), ("three", {}), ("lookup", {}), ("two", {"top_p": 0.8, "temperature": 0.9})],
)
def test_text_follows_the_target(name, params):
    count = 1000
    served = runner([{"seed": 7919 * i, **params} for i in range(count)], name)
    while min(map(len, served.texts())) <= 7:
        served.step()
    texts = [tuple(text[4:7]) for text in served.texts()]
    assert chi_square_p_value(texts, joint(params, 3)) > 1e-6


def test_a_request_without_a_proposal_has_no_drafts():
    """Its row is stale: another batch was drafted for since."""
    served = runner([{"temperature": 1.0}] * 3, "two")
    served.step()
    served.drafter.state.row_of_slot[served.slots[1]] = -1
    output = served.step()
    assert output.num_sampled[1] == 1
