"""Serving with some of the hosted levels."""

from types import SimpleNamespace

import pytest

from vllm_hsd.cascade import LevelPlan
from vllm_hsd.engine_runs import EngineProcess
from vllm_hsd.runner_v1.proposer import CascadeProposer


@pytest.fixture
def proposer():
    """One that hosts three levels and runs nothing."""
    bare = object.__new__(CascadeProposer)
    bare.hosted = ["bigram", "small", "mid"]
    bare.plans = [LevelPlan(4, window="entropy"), LevelPlan(4), LevelPlan(8)]
    bare.speculative_config = SimpleNamespace(hsd=SimpleNamespace(num_speculative_tokens=8, tail=0))
    bare.vllm_config = SimpleNamespace(model_config=SimpleNamespace(seed=0))
    return bare


def test_levels_in_use_keep_their_plans_and_get_new_budgets(proposer):
    proposer.use([0, 2], [2, 6])
    assert proposer.cascade.levels == ["bigram", "mid"]
    assert proposer.cascade.plans == [LevelPlan(2, window="entropy"), LevelPlan(6)]
    assert proposer.num_speculative_tokens == 6
    proposer.cascade.stats[1].drafted = 5
    assert [stats.drafted for stats in proposer.take_stats()] == [0, 0, 5]


@pytest.mark.parametrize(
    ("levels", "budgets", "message"),
    [
        ([], [], "no cascade of the 3 hosted"),
        ([1, 1], [2, 4], "no cascade of the 3 hosted"),
        ([3], [4], "no cascade of the 3 hosted"),
        ([0, 1], [4], "do not give every one"),
        ([0, 1], [0, 4], "do not give every one"),
        ([0, 1], [4, 9], "end above num_speculative_tokens=8"),
    ],
)
def test_levels_and_budgets_that_do_not_fit_are_refused(proposer, levels, budgets, message):
    with pytest.raises(ValueError, match=message):
        proposer.use(levels, budgets)


def test_an_engine_changes_its_cascade_between_requests(text_family, tmp_path):
    config = {
        "method": "hsd",
        "num_speculative_tokens": 4,
        "levels": [{"model": text_family.small, "num_tokens": 3}, {"model": text_family.mid}],
    }
    drafted = []
    with EngineProcess("both", text_family.target, config, tmp_path / "log") as engine:
        outputs = []
        for levels, budgets in (([0, 1], [2, 4]), ([1], [3]), ([0], [2]), ([0, 1], [3, 4])):
            engine.use(budgets, levels)
            run = engine.generate(["def f(", "import "], 0.0, 16)
            outputs.append(run.token_ids)
            drafted.append([level["drafted"] > 0 for level in run.levels])
    assert all(output == outputs[0] for output in outputs)
    assert drafted == [[True, True], [False, True], [True, False], [True, True]]
