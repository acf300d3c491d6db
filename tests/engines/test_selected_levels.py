"""One engine on a CPU that compares cascades: sources of a level are selected between requests.

Levels are selected in tools/test_engine.py.
"""

from support.engines import PROMPTS, started
from support.level_files import cascade

GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}


def test_sources_of_a_level_are_selected(family):
    sources = [{"ngram": {"min": 1, "max": 3}}, {"suffix": {"min_acceptance": 0.01}}]
    level = {"sources": [*sources, {"model": family.mid}]}
    config = cascade(level, num_speculative_tokens=6)
    with started({"model": family.target, **config}) as engine:
        found = [engine.generate(PROMPTS, GREEDY)]
        for selected in ([2], [0, 1], [1]):
            engine.select_levels([0], [6], selected)
            found.append(engine.generate(PROMPTS, GREEDY))
    for run in found:
        assert run.token_ids == found[0].token_ids
        assert 0 < run.accepted <= run.drafted
    forwards = [run.levels[0]["forwards"] for run in found]
    assert forwards[0] > 0 and forwards[1] > 0 and forwards[2] == forwards[3] == 0
