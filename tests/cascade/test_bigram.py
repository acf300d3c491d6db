"""Pairs against counting by hand, successors against them, and the drafts that they make."""

import itertools
from collections import Counter

import numpy as np
import pytest

from vllm_hsd.cascade.bigram import count_pairs, successors
from vllm_hsd.cascade.text_store import collect_texts
from vllm_hsd.tools.lookup_level import Texts
from vllm_hsd.tools.planner.bigram_levels import BigramLevel, BigramModelLevel


def test_successors_are_the_likeliest_tokens():
    """Also where a single token outweighs every pair: many different followers, each seen once."""
    rng = np.random.default_rng(3)
    texts = [rng.zipf(1.4, size=200) % 30 for _ in range(4)]
    texts.append(np.array([31, 32, 31, 33, 31, 34, 31, 35, 31, 36]))
    store = collect_texts([*texts, np.full(400, 37)], 40)
    pairs = count_pairs(store)
    found, probs = successors(store)
    for token in range(40):
        if found[token] < 0:
            assert np.diff(pairs.starts)[token] == 0 and probs[token] == 0
        else:
            row = pairs.distribution(token)
            assert row[found[token]] == row.max()
            np.testing.assert_allclose(probs[token], row.max(), rtol=1e-6)
    assert (found < 0).any() and found[31] == 37


@pytest.mark.parametrize("seed", range(8))
def test_probabilities_equal_counting_by_hand(seed):
    """Of every position that is asked for; token 4 is in no text of the store."""
    rng = np.random.default_rng(seed)
    store = [rng.integers(0, 4, size=n).tolist() for n in rng.integers(1, 30, size=4)] + [[0, 1]]
    level = BigramModelLevel(collect_texts(map(np.array, store), 5))
    text = rng.integers(0, 5, size=(1, 12)).astype(np.int32)
    one = np.ones(1, np.int64)
    found = level.forward(text, 0 * one, 0 * one, 12 * one, 9 * one).exp().numpy()
    for row, last in zip(found, text[0, 3:], strict=True):
        seen = Counter(t for d in store for s, t in itertools.pairwise(d) if s == last)
        single = (1 + np.bincount(np.concatenate(store), minlength=5)) / (5 + sum(map(len, store)))
        counts = np.array([seen[t] for t in range(5)])
        weight = len(seen) or 1
        np.testing.assert_allclose(row, (counts + weight * single) / (counts.sum() + weight), 1e-5)


def test_no_pair_spans_two_texts():
    found, _ = successors(collect_texts([np.array([0, 1]), np.array([2, 3])], 4))
    assert found.tolist() == [1, -1, 3, -1]


def test_chains_end_where_there_is_no_successor():
    level = BigramLevel(collect_texts([np.array([0, 1, 2]), np.array([3, 3])], 5))
    tokens = np.array([[4, 0, 0, 0], [3, 0, 0, 0], [4, 0, 0, 0], [1, 3, 0, 0]], np.int32)
    rows, ends = np.arange(4), np.array([2, 1, 1, 2])
    found = level.lookup(Texts(tokens, rows, rows, ends), np.array([3, 3, 3, 0]))
    assert found.counts.tolist() == [2, 3, 0, 0]
    assert found.token_ids.tolist() == [[1, 2, 0], [3, 3, 3], [0, 0, 0], [0, 0, 0]]
    assert (np.diff(found.confidence[1]) < 0).all() and (found.confidence[2:] == 0).all()
