"""Outputs of ended requests, drafted for others: whole engines."""

import pytest
from support.cascades import head
from support.engines import GREEDY, PROMPTS, run_engine
from support.level_files import cascade

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def accepted(family, source: list[dict] | dict) -> tuple[list[list[int]], list[int]]:
    """Tokens of a prompt served three times, at last with another, and accepted ones of each."""
    config = cascade(source, num_speculative_tokens=4)
    one, two = [PROMPTS[1]], [PROMPTS[1], PROMPTS[2]]
    jobs = {
        name: {"prompts": prompts, "params": GREEDY}
        for name, prompts in (("first", one), ("again", one), ("with another", two))
    }
    engine = {"model": family.target, "max_num_seqs": 2, **config}
    found = run_engine(engine, jobs)
    return (
        [found[job]["outputs"][0][0]["ids"] for job in jobs],
        [found[job]["counters"]["spec_decode_num_accepted_tokens"] for job in jobs],
    )


@pytest.mark.parametrize("other", [None, "ngram", "eagle3"])
def test_outputs_are_drafted_for_later_requests(other, family, greedy_tokens):
    """Of 9 tokens, the first of which comes with the prompt; a head's first drafts are trusted."""
    suffix = {"suffix": {"min_acceptance": 0.01, "shared_tokens": 500}}
    sources = {"ngram": {"ngram": {"min": 3, "max": 3}}, "eagle3": {"eagle3": head(family)}}
    level = suffix if other is None else {"sources": [suffix, sources[other]]}
    texts, counts = accepted(family, level)
    assert texts == [greedy_tokens[1]] * 3
    assert counts[0] < 4 <= counts[1] and counts[2] >= 5


def test_nothing_is_shared_unless_configured(family):
    """Negative control of the count above."""
    texts, counts = accepted(family, {"suffix": {"min_acceptance": 0.01}})
    assert texts[0] == texts[1] and counts[0] == counts[1] < 4
