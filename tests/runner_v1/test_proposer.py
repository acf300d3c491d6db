"""Serving with some of the hosted levels."""

from types import SimpleNamespace

import pytest

from vllm_hsd.core.cascade import LevelOptions
from vllm_hsd.engine import EngineProcess
from vllm_hsd.runner_v1.proposer import CascadeProposer


@pytest.fixture
def proposer():
    """One that hosts three levels and runs nothing."""
    bare = object.__new__(CascadeProposer)
    bare.hosted = ["bigram", "small", "mid"]
    bare.plans = [LevelOptions(4, stopping="entropy"), LevelOptions(4), LevelOptions(8)]
    bare.speculative_config = SimpleNamespace(
        hsd=SimpleNamespace(num_speculative_tokens=8, horizontal_tokens=0)
    )
    bare.vllm_config = SimpleNamespace(model_config=SimpleNamespace(seed=0))
    return bare


def test_levels_in_use_keep_their_plans_and_get_new_budgets(proposer):
    proposer.use([0, 2], [2, 6])
    assert proposer.cascade.levels == ["bigram", "mid"]
    assert proposer.cascade.plans == [LevelOptions(2, stopping="entropy"), LevelOptions(6)]
    assert proposer.num_speculative_tokens == 6
    proposer.cascade.stats[1].drafted = 5
    assert [stats.drafted for stats in proposer.take_stats()] == [0, 0, 5]


@pytest.mark.parametrize(
    ("levels", "draft_lengths", "message"),
    [
        ([], [], "no cascade of the 3 hosted"),
        ([1, 1], [2, 4], "no cascade of the 3 hosted"),
        ([3], [4], "no cascade of the 3 hosted"),
        ([0, 1], [4], "do not give every one"),
        ([0, 1], [0, 4], "do not give every one"),
        ([0, 1], [4, 9], "end above num_speculative_tokens=8"),
    ],
)
def test_levels_and_budgets_that_do_not_fit_are_refused(proposer, levels, draft_lengths, message):
    with pytest.raises(ValueError, match=message):
        proposer.use(levels, draft_lengths)


def test_an_engine_changes_its_cascade_between_requests(text_family, tmp_path):
    config = {
        "method": "hsd",
        "num_speculative_tokens": 4,
        "levels": [{"model": text_family.small, "num_tokens": 3}, {"model": text_family.mid}],
    }
    engine_args = {
        "model": text_family.target,
        "speculative_config": config,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "kv_cache_memory_bytes": 1 << 26,
    }
    drafted = []
    with EngineProcess(engine_args, log=tmp_path / "log") as engine:
        outputs = []
        for levels, draft_lengths in (([0, 1], [2, 4]), ([1], [3]), ([0], [2]), ([0, 1], [3, 4])):
            engine.select_levels(levels, draft_lengths)
            greedy = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
            run = engine.generate(["def f(", "import "], greedy)
            outputs.append(run.token_ids)
            drafted.append([level["drafted"] > 0 for level in run.levels])
    assert all(output == outputs[0] for output in outputs)
    assert drafted == [[True, True], [False, True], [True, False], [True, True]]
