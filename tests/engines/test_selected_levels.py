"""One engine on a CPU that compares cascades: levels and sources are selected between requests."""

import pytest
from support.engines import PROMPTS, run_engine

from vllm_hsd.errors import UserError
from vllm_hsd.tools.engine import _select_levels, generate

GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}


def run_selections(llm, jobs: dict) -> list:
    """(generation of each selection, what a wrong one says)."""
    found = []
    for selected in jobs["selections"]:
        if selected:
            _select_levels(llm, *selected)
        found.append(generate(llm, PROMPTS, [GREEDY] * len(PROMPTS)))
    with pytest.raises((ValueError, UserError, RuntimeError), match=r"levels \[2\]"):
        _select_levels(llm, [2], [4], None)
    return found


def serve(family, levels: list[dict], selections: list) -> list:
    config = {"method": "hsd", "num_speculative_tokens": 6, "levels": levels, "adaptive": False}
    engine = {"model": family.target, "speculative_config": config, "disable_log_stats": False}
    found = run_engine(engine, {"selections": selections}, work=run_selections)
    for run in found:
        assert run.token_ids == found[0].token_ids
        assert 0 < run.accepted <= run.drafted
    return found


def test_one_engine_serves_several_cascades(family):
    levels = [{"model": family.small, "num_tokens": 3}, {"model": family.mid}]
    selections = [None, ([1], [4], None), ([0], [2], None), ([0, 1], [3, 4], None)]
    found = serve(family, levels, selections)
    drafted = [[level["drafted"] > 0 for level in run.levels] for run in found]
    assert drafted == [[True, True], [False, True], [True, False], [True, True]]
    for run, top in zip(found, (1, 1, 0, 1), strict=True):
        counted = run.levels[top]
        assert (counted["drafted"], counted["accepted"]) == (run.drafted, run.accepted)
    assert found[1].levels[0]["forwards"] == found[2].levels[1]["forwards"] == 0
    first, *_, last = found
    assert first.levels[1]["forwards"] > 0 < last.levels[0]["forwards"]


def test_sources_of_a_level_are_selected(family):
    sources = [{"ngram": {"min": 1, "max": 3}}, {"suffix": {"min_acceptance": 0.01}}]
    levels = [{"sources": [*sources, {"model": family.mid}]}]
    found = serve(family, levels, [None, ([0], [6], [2]), ([0], [6], [0, 1]), ([0], [6], [1])])
    forwards = [run.levels[0]["forwards"] for run in found]
    assert forwards[0] > 0 and forwards[1] > 0 and forwards[2] == forwards[3] == 0
