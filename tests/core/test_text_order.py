"""The order of a store's texts, and the suffix rule of the V2 runner next to the host's trees."""

import numpy as np
import pytest
from support.suffix_extra import needs_suffix
from support.suffix_votes import SuffixVotes

from vllm_hsd.core.levels import Texts
from vllm_hsd.core.suffix import SuffixLevel
from vllm_hsd.core.text_order import DEPTH, END_OF_TEXT, order_texts
from vllm_hsd.core.text_store import collect_texts


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


# Committed tokens, drafted ones, and requested ones.
BOUNDS = (1, 120), (0, 4), (1, 12)


def markov(rng: np.random.Generator, rows: np.ndarray, length: int) -> np.ndarray:
    text = [0]
    while len(text) < length:
        text.append(int(rng.choice(len(rows), p=rows[text[-1]])))
    return np.array(text, np.int32)


@needs_suffix
@pytest.mark.parametrize("vocabulary", [4, 60])
def test_the_tokens_of_the_hosts_trees(vocabulary):
    """But for ties, which the trees break by the order in which they were built."""
    rng = np.random.default_rng(vocabulary)
    rows = rng.dirichlet(np.full(vocabulary, 0.2), size=vocabulary)
    store = collect_texts([markov(rng, rows, 150) for _ in range(12)], vocabulary)
    host, votes = SuffixLevel(store), SuffixVotes(order_texts(store, "cpu"))
    equal, zero = [], np.zeros(1, np.int64)
    for slot in range(100):
        committed, drafted, room = (int(rng.integers(*bounds)) for bounds in BOUNDS)
        tokens = np.zeros((1, committed + drafted + room), np.int32)
        tokens[0, : committed + drafted] = markov(rng, rows, committed + drafted)
        each = []
        for level in (host, votes):
            texts = Texts(tokens, zero, np.array([slot]), np.array([committed]))
            level.read(texts)
            texts = texts._replace(ends=np.array([committed + drafted]))
            each.append(level.lookup_each(texts, np.array([room])))
        for one, other in zip(*each, strict=True):
            equal.append(np.array_equal(one.token_ids, other.token_ids))
    assert np.mean(equal) > 0.8
