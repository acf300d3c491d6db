"""Levels of stores: pairs and successors, which texts a suffix finds, and the order of texts."""

import itertools
from collections import Counter

import numpy as np
import pytest

from vllm_hsd.cascade.bigram import count_pairs, successors
from vllm_hsd.cascade.text_order import DEPTH, END_OF_TEXT, order_texts
from vllm_hsd.cascade.text_store import collect_texts, read_store, store_vocab_size, write_store
from vllm_hsd.tools.lookup_level import Texts
from vllm_hsd.tools.planner.bigram_levels import BigramLevel, BigramModelLevel
from vllm_hsd.tools.planner.suffix_level import SuffixLevel

VOCABULARY = 100
STORY = list(range(40, 60))


def continued(level: SuffixLevel, text: list[int], *, slot: int = 0, room: int = 4) -> list[int]:
    """What the level finds after a text that is all committed."""
    tokens = np.zeros((1, len(text) + room), dtype=np.int32)
    tokens[0, : len(text)] = text
    texts = Texts(tokens, np.zeros(1, dtype=np.int64), np.array([slot]), np.array([len(text)]))
    level.read(texts)
    found = level.lookup(texts, np.array([room]))
    confidence = found.confidence[0, : found.counts[0]]
    assert (confidence > 0).all() and (np.diff(confidence) <= 0).all() and (confidence <= 1).all()
    return found.token_ids[0, : found.counts[0]].tolist()


def test_own_text_is_continued():
    level = SuffixLevel()
    assert continued(level, [*STORY, 1, 2, *STORY[:8]]) == STORY[8:12]
    assert continued(level, [*STORY, 1, 2, *STORY[:8], 48, 49], room=2) == STORY[10:12]
    assert continued(level, [7, 8, 9], slot=1) == []


def test_the_end_of_the_text_may_be_unverified():
    level = SuffixLevel()
    text = np.array([[*STORY, 1, *STORY[:8], 0, 0]], dtype=np.int32)
    zero = np.zeros(1, dtype=np.int64)
    level.read(Texts(text, zero, zero, np.array([22])))
    found = level.lookup(Texts(text, zero, zero, np.array([29])), np.array([2]))
    assert found.token_ids.tolist() == [STORY[8:10]]


def test_a_store_is_found():
    store = collect_texts([np.array(STORY), np.array([9, 8, 7, 6])], VOCABULARY)
    level = SuffixLevel(order_texts(store, "cpu"))
    assert continued(level, [1, 2, *STORY[:6]]) == STORY[6:10]
    assert continued(level, [1, 2, 9, 8, 7], slot=1) == [6]


def test_outputs_of_others_are_found():
    level = SuffixLevel(shared=np.array(STORY, np.int32))
    assert continued(level, [1, *STORY[:6]]) == STORY[6:10]


def test_stores_come_back(tmp_path):
    path = str(tmp_path / "store")
    texts = [np.array([3, 1, 4]), np.array([], dtype=np.int64), np.array([5])]
    write_store(collect_texts(texts, VOCABULARY), path)
    store = read_store(path)
    assert [text.tolist() for text in store] == [[3, 1, 4], [5]]
    assert store_vocab_size(path) == store.vocab_size == VOCABULARY
    assert store.tokens.dtype == np.int32


@pytest.mark.parametrize("seed", range(8))
def test_texts_are_in_the_order_of_their_continuations(seed):
    """Few tokens, so that many texts go on alike; also beyond the depth."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 200, 7)
    texts = [rng.integers(0, rng.integers(1, 5), n) for n in lengths]
    ordered = order_texts(collect_texts(texts, 10), "cpu")
    tokens = ordered.tokens.tolist()
    assert tokens == [t for text in texts for t in (*text.tolist(), END_OF_TEXT)]

    def continuation(place: int) -> list[int]:
        end = tokens.index(END_OF_TEXT, place)
        return tokens[place : min(end, place + DEPTH)]

    found = list(map(continuation, ordered.order.tolist()))
    assert found == sorted(found)
    assert sorted(ordered.order.tolist()) == [i for i, t in enumerate(tokens) if t >= 0]


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


def test_chains_end_where_there_is_no_successor():
    level = BigramLevel(collect_texts([np.array([0, 1, 2]), np.array([3, 3])], 5))
    tokens = np.array([[4, 0, 0, 0], [3, 0, 0, 0], [4, 0, 0, 0], [1, 3, 0, 0]], np.int32)
    rows, ends = np.arange(4), np.array([2, 1, 1, 2])
    found = level.lookup(Texts(tokens, rows, rows, ends), np.array([3, 3, 3, 0]))
    assert found.counts.tolist() == [2, 3, 0, 0]
    assert found.token_ids.tolist() == [[1, 2, 0], [3, 3, 3], [0, 0, 0], [0, 0, 0]]
    assert (np.diff(found.confidence[1]) < 0).all() and (found.confidence[2:] == 0).all()
