"""The order of a store's texts."""

import numpy as np
import pytest

from vllm_hsd.cascade.text_order import DEPTH, END_OF_TEXT, order_texts
from vllm_hsd.cascade.text_store import collect_texts


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
