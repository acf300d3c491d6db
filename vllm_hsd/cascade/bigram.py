"""A bigram level: the likeliest token after the last one, by the pairs in a store of texts.

Its drafts are point masses. The n-gram model of order 1 draws from the distribution of the same
counts, see `cascade.ngram_model`, whose P_1 is meant by "likeliest" here.
"""

from __future__ import annotations

import numpy as np

from vllm_hsd.cascade.level import LookupLevel, LookupResult, Texts
from vllm_hsd.cascade.ngram_model import count_pairs
from vllm_hsd.cascade.text_store import TextStore


def successors(store: TextStore) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest token after each token, and how likely it is.

    Returns:
        [V] int32, -1 after a token without a pair; [V] float64, 0 there.
    """
    pairs = count_pairs(store)
    sizes = np.diff(pairs.starts)
    first = np.repeat(np.arange(store.vocab_size), sizes)
    # P_1 without the common divisor; a token without a pair is the likeliest one at most where many
    # different ones were seen.
    value = pairs.counts + sizes[first] * pairs.single[pairs.following]
    order = np.lexsort((-pairs.following, value, first))
    best = order[np.cumsum(sizes)[sizes > 0] - 1]
    after, common = first[best], int(pairs.single.argmax())
    unseen = sizes[after] * pairs.single[common]
    found, probs = np.full(store.vocab_size, -1, np.int32), np.zeros(store.vocab_size)
    found[after] = np.where(unseen > value[best], common, pairs.following[best])
    totals = np.bincount(first, pairs.counts)[after]
    probs[after] = np.maximum(unseen, value[best]) / (totals + sizes[after])
    return found, probs


class BigramLevel(LookupLevel):
    """A lookup of successors, one after the other.

    Args:
        store: texts like those to be generated.
    """

    def __init__(self, store: TextStore) -> None:
        self.successors, self.probs = successors(store)

    def lookup(self, texts: Texts, requested: np.ndarray) -> LookupResult:
        rows, width = texts.rows, int(requested.max(initial=0))
        token_ids = np.zeros((len(rows), width), dtype=np.int64)
        confidence = np.zeros((len(rows), width))
        counts = np.zeros(len(rows), dtype=np.int64)
        last, certainty = texts.tokens[rows, texts.ends - 1], np.ones(len(rows))
        for place in range(width):
            certainty = certainty * self.probs[last]
            last = self.successors[last]
            # A chain that has ended is at -1, and whatever follows is not used.
            grows = (counts == place) & (last >= 0) & (place < requested)
            token_ids[grows, place], confidence[grows, place] = last[grows], certainty[grows]
            counts += grows
        return LookupResult(token_ids, counts, confidence)
