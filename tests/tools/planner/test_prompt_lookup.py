"""The replayed prompt lookup against vLLM's own, and its acceptance along texts."""

import numpy as np
import pytest
from vllm.v1.spec_decode import ngram_proposer

from vllm_hsd.cascade.level import LookupResult
from vllm_hsd.tools.lookup_level import LookupLevel
from vllm_hsd.tools.planner.prompt_lookup import PromptLookup, propose, replay
from vllm_hsd.tools.planner.survival import lookup_table

# Without its compiler.
of_vllm = ngram_proposer._find_longest_matched_ngram_and_propose_tokens.py_func


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 4), (2, 3)])
def test_proposals_are_those_of_vllm(shortest, longest):
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(400):
        tokens = rng.integers(rng.integers(2, 6), size=rng.integers(1, 30))
        asked = int(rng.integers(1, 7))
        theirs = of_vllm(tokens, shortest, longest, 10**6, asked)
        assert propose(tokens, shortest, longest, asked).tolist() == theirs.tolist()
        found += len(theirs)
    assert found > 500


def test_a_replay_compares_each_proposal_with_the_text():
    context, text = np.array([1, 2, 3, 9]), np.array([1, 2, 3, 4, 7])
    offered, accepted = replay(PromptLookup(1, 3), context, text, 3, committed=True)
    # After 9 and 4: nothing. After 1, 2 and 3: what followed them before, up to three tokens.
    assert offered.tolist() == [0, 3, 3, 3, 0]
    assert accepted.tolist() == [0, 2, 1, 0, 0]


class Matcher(LookupLevel):
    """vLLM's lookup as a level, which finds matches in what it has read, continued past that."""

    def read(self, texts):
        self.known = int(texts.ends[0])

    def lookup(self, texts, requested):
        text = texts.tokens[0, : texts.ends[0]].astype(np.int64)
        found = propose(text, 1, 3, int(requested[0]))
        unread = len(text) > self.known
        count = 0 if unread else len(found)
        return LookupResult(np.append(found, 0)[None], np.array([count]), np.ones((1, 9)))


def test_a_level_is_replayed_along_the_targets_text_and_along_a_draft():
    context, text = np.array([1, 2, 3, 9]), np.array([1, 2, 3, 4, 7])
    expected = replay(PromptLookup(1, 3), context, text, 3, committed=True)
    found = replay(Matcher(), context, text, 3, committed=True)
    assert np.array_equal(found, expected)
    offered, _ = replay(Matcher(), context, text, 3, committed=False)
    assert offered.tolist() == [0, 0, 0, 0, 0]


def test_the_table_counts_rounds_along_the_texts():
    """One text: a round of one token at 0, whose bonus is token 1, and so on."""
    offered = np.array([[2, 2, 0, 1, 0, 0]])
    accepted = np.array([[1, 0, 0, 1, 0, 0]])
    table = lookup_table(offered, accepted, np.array([6]), 2, by_position=False)
    # Drafts of 1 start at 0 (1 kept), 2, 3 (1 kept) and 5, where one token is left.
    assert table[1, 0][2, 1] == table[1, 1][2, 1] == pytest.approx(1 / 4)
    assert table[1, 0][0, 0] == pytest.approx(2 / 4) and table[1, 0][1, 1] == pytest.approx(1 / 4)
    # Drafts of 2 need two tokens: they start at 0, 2 and 3; the rest has no room.
    assert table[2, 0][2, 1] == table[2, 0][1, 1] == table[2, 0][0, 0] == pytest.approx(1 / 3)
    by_position = lookup_table(offered, accepted, np.array([6]), 2, by_position=True)
    assert by_position[1, 0][2, 1] == 1 and by_position[1, 2][0, 0] == 1
    assert np.allclose(by_position.sum((-2, -1)), 1)
