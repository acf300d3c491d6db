"""Levels that know the last token alone, by the pairs in a store of texts.

    P(next) = (count(last, next) + d * P_0(next)) / (n + d)

with n tokens seen after the last one, d of them distinct, and P_0 of single tokens (Witten and
Bell, "The zero-frequency problem", 1991, method C). `bigram` drafts the likeliest one, a point
mass; `bigram_model` draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_hsd.cascade.level import UNLIMITED, LookupLevel, LookupResult, Texts
from vllm_hsd.cascade.ragged import last_positions
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


class BigramModelLevel:
    """A level whose logits are the logarithms of P.

    Args:
        store: texts like those to be generated.
        device: where the logits are wanted.
    """

    context_length = UNLIMITED

    def __init__(self, store: TextStore, device: torch.device | str = "cpu") -> None:
        self.pairs, self.device = count_pairs(store), device

    def forward(
        self,
        tokens: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        num_logits: np.ndarray,
    ) -> torch.Tensor | None:
        owners, positions = last_positions(starts + counts, num_logits)
        if not len(owners):
            return None
        found = np.empty((len(owners), len(self.pairs.single)), np.float32)
        for row, token in zip(found, tokens[rows[owners], positions], strict=True):
            np.log(self.pairs.distribution(token), out=row, casting="same_kind")
        return torch.from_numpy(found).to(self.device)
