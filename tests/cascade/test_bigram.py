"""Successors of tokens against the n-gram model of order 1, and the drafts that they make."""

import numpy as np

from vllm_hsd.cascade.bigram import BigramLevel, successors
from vllm_hsd.cascade.level import Texts
from vllm_hsd.cascade.ngram_model import NgramModelLevel
from vllm_hsd.cascade.text_store import collect_texts


def test_successors_are_the_likeliest_tokens():
    """Also where a single token outweighs every pair: many different followers, each seen once."""
    rng = np.random.default_rng(3)
    texts = [rng.zipf(1.4, size=200) % 30 for _ in range(4)]
    texts.append(np.array([31, 32, 31, 33, 31, 34, 31, 35, 31, 36]))
    store = collect_texts([*texts, np.full(400, 37)], 40)
    model = NgramModelLevel(store, 1)
    found, probs = successors(store)
    for token in range(40):
        if found[token] < 0:
            assert np.diff(model.pairs.starts)[token] == 0 and probs[token] == 0
        else:
            row = model.distribution(np.array([token], np.int32))
            assert row[found[token]] == row.max()
            np.testing.assert_allclose(probs[token], row.max(), rtol=1e-6)
    assert (found < 0).any() and found[31] == 37


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
