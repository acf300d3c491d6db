"""What levels know that look at the last token alone: the pairs in a store of texts.

    P(next) = (count(last, next) + d * P_0(next)) / (n + d)

with n tokens seen after the last one, d of them distinct, and P_0 of single tokens (Witten and
Bell, "The zero-frequency problem", 1991, method C). `bigram` drafts the likeliest one, a point
mass; `bigram_model` draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_hsd.cascade.text_store import TextStore


@dataclass
class PairCounts:
    """Pairs of tokens in a store, as a sparse matrix by rows (CSR).

    Attributes:
        starts: [V + 1] int64; the pairs that begin with token v are starts[v] to starts[v + 1] - 1.
        following: [P] int64, the second token of every pair, increasing for each first token.
        counts: [P] int64, how often each pair occurs, at least 1.
        seen: [V] int64, tokens seen after each token.
        single: [V] float64, P_0: tokens counted with one added to each; sums to 1.
    """

    starts: np.ndarray
    following: np.ndarray
    counts: np.ndarray
    seen: np.ndarray
    single: np.ndarray

    def distribution(self, token: int) -> np.ndarray:
        """[V] float64 probabilities of what follows a token."""
        first, last = self.starts[token : token + 2]
        if first == last:
            return self.single
        probs = (last - first) * self.single
        probs[self.following[first:last]] += self.counts[first:last]
        found: np.ndarray = probs / (self.seen[token] + last - first)
        return found


def count_pairs(store: TextStore) -> PairCounts:
    """Count the pairs of a store; none spans two texts."""
    vocab_size = store.vocab_size
    single = 1.0 + np.bincount(store.tokens, minlength=vocab_size)
    inside = np.ones(len(store.tokens), dtype=bool)
    inside[store.starts[:-1]] = False
    second = np.flatnonzero(inside)
    pairs = store.tokens[second - 1].astype(np.int64) * vocab_size + store.tokens[second]
    distinct, counts = np.unique(pairs, return_counts=True)
    previous, following = np.divmod(distinct, vocab_size)
    starts = np.searchsorted(previous, np.arange(vocab_size + 1))
    seen = np.bincount(previous, counts, vocab_size).astype(np.int64)
    return PairCounts(starts, following, counts, seen, single / single.sum())


def successors(store: TextStore) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest token after each token, and how likely it is.

    Returns:
        [V] int32, -1 after a token without a pair; [V] float64, 0 there.
    """
    pairs = count_pairs(store)
    sizes = np.diff(pairs.starts)
    first = np.repeat(np.arange(store.vocab_size), sizes)
    # Without the common divisor; a token without a pair is the likeliest one at most where many
    # different ones were seen.
    value = pairs.counts + sizes[first] * pairs.single[pairs.following]
    order = np.lexsort((-pairs.following, value, first))
    best = order[np.cumsum(sizes)[sizes > 0] - 1]
    after, common = first[best], int(pairs.single.argmax())
    unseen = sizes[after] * pairs.single[common]
    found, probs = np.full(store.vocab_size, -1, np.int32), np.zeros(store.vocab_size)
    found[after] = np.where(unseen > value[best], common, pairs.following[best])
    probs[after] = np.maximum(unseen, value[best]) / (pairs.seen + sizes)[after]
    return found, probs
