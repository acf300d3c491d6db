"""On a CPU the scheduler is told how long each draft is; on a GPU it always plans the longest."""

import pytest
from support.engines import ids
from support.v2_engines import GREEDY, PROMPTS, run_engine

pytestmark = [pytest.mark.triton, pytest.mark.timeout(900)]
LENGTH = 4


def test_the_target_verifies_what_was_drafted_and_no_more(family, greedy_tokens):
    """A lookup seldom has whole drafts, and often none."""
    config = {
        "method": "hsd",
        "num_speculative_tokens": LENGTH,
        "levels": [{"ngram": {"min": 1, "max": 2}}],
    }
    engine = {"model": family.target, "speculative_config": config, "max_num_batched_tokens": 24}
    jobs = {"joining": {"prompts": PROMPTS, "params": GREEDY, "arrive": [0, 2, 3, 5]}}
    result = run_engine(engine, jobs)["joining"]
    assert ids(result) == greedy_tokens
    drafts, tokens, accepted = (
        result["counters"][f"spec_decode_num_{name}"]
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < accepted <= tokens < LENGTH * drafts
    (level,) = result["levels"]
    assert level["accepted"] == accepted
