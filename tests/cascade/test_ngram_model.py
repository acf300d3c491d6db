"""The n-gram model against counting by hand."""

from collections import Counter

import numpy as np
import pytest

from vllm_hsd.cascade.ngram_model import OWN_WEIGHT, NgramModelLevel
from vllm_hsd.cascade.text_store import collect_texts

VOCABULARY, ORDER = 5, 6


def by_hand(store: list[list[int]], text: list[int], order: int) -> np.ndarray:
    """[V] float64: every order counted over again, from single tokens up."""
    single = np.ones(VOCABULARY)
    for document in store:
        single += np.bincount(document, minlength=VOCABULARY)
    probs = single / single.sum()
    for k in range(1, min(order, len(text)) + 1):
        counts: Counter[int] = Counter()
        for document, weight in [*((d, 1.0) for d in store), (text, OWN_WEIGHT)]:
            for i in range(k, len(document)):
                if document[i - k : i] == text[-k:]:
                    counts[document[i]] += weight
        if not counts:
            break
        found = np.bincount(list(counts), list(counts.values()), VOCABULARY)
        probs = (found + len(counts) * probs) / (found.sum() + len(counts))
    return probs


@pytest.mark.parametrize("order", [1, 2, ORDER])
@pytest.mark.parametrize("seed", range(8))
def test_equals_counting_by_hand(seed, order):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, size=4)
    store = [rng.integers(0, VOCABULARY - 1, size=n).tolist() for n in lengths] + [[0, 1]]
    level = NgramModelLevel(collect_texts(map(np.array, store), VOCABULARY), order)
    # Token 4 is in no text of the store.
    text = rng.integers(0, VOCABULARY, size=12)
    for end in range(1, len(text) + 1):
        expected = by_hand(store, text[:end].tolist(), order)
        found = level.distribution(text[:end].astype(np.int32))
        assert (found > 0).all()
        np.testing.assert_allclose(found, expected, rtol=1e-5)
