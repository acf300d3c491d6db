"""An n-gram language model as a level: counts in a store of texts and in the request's own text.

The counts of the longest context are backed off to those of shorter ones, down to single tokens:

    P_k(next) = (count_k(next) + d_k * P_{k-1}(next)) / (n_k + d_k)

with n_k tokens seen after the last k tokens of the text, d_k of them distinct (Witten and Bell,
"The zero-frequency problem", 1991, method C). Where suffix lookups propose one token, this is a
distribution to draw from, which at temperatures near 1 is accepted more often.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from vllm_hsd.cascade.level import UNLIMITED
from vllm_hsd.cascade.ragged import last_positions
from vllm_hsd.cascade.text_store import TextStore

# An occurrence in the request's own text counts as so many in the store: accepted more often than
# with 1 in chats that SmolLM2 wrote itself.
OWN_WEIGHT = 3.0
# Latest occurrences of the last token that are looked at there.
OWN_OCCURRENCES = 256
_NONE = np.zeros(0, np.int32)


@dataclass
class PairCounts:
    """Pairs of tokens in a store, as a sparse matrix by rows (CSR).

    Attributes:
        starts: [V + 1] int64; the pairs that begin with token v are starts[v] to starts[v + 1] - 1.
        following: [P] int64, the second token of every pair, increasing for each first token.
        counts: [P] int64, how often each pair occurs, at least 1.
        single: [V] float64, P_0: tokens counted with one added to each; sums to 1.
    """

    starts: np.ndarray
    following: np.ndarray
    counts: np.ndarray
    single: np.ndarray


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
    return PairCounts(starts, following, counts, single / single.sum())


class ContextIndex:
    """Where contexts of 2 to `order` tokens occur in a store, and what follows them.

    Args:
        store: the texts; no context spans two of them.
        order: longest context in tokens.
    """

    def __init__(self, store: TextStore, order: int) -> None:
        inside = np.arange(len(store.tokens)) - np.repeat(store.starts[:-1], np.diff(store.starts))
        places = np.flatnonzero(inside >= 2)
        # keys[k]: the token k + 1 places before each one, -1 before the text.
        keys = np.full((order, len(places)), -1, np.int32)
        for k in range(order):
            there = inside[places] > k
            keys[k, there] = store.tokens[places[there] - k - 1]
        # In this order, tokens after the same context of any length stand together.
        sort = np.lexsort(keys[::-1])
        self.keys, self.next = keys[:, sort], store.tokens[places[sort]]

    def followers(self, context: np.ndarray) -> Iterator[np.ndarray]:
        """Tokens seen after the last 2, 3, ... tokens of a context, as long as there are any.

        Args:
            context: [up to `order`] int, the nearest token first.

        Yields:
            [n] int32, a token as often as it was seen.
        """
        low, high = 0, len(self.next)
        for k, token in enumerate(context):
            within = self.keys[k, low:high]
            # Of the same type: searching would copy the keys otherwise.
            low, high = low + np.searchsorted(within, np.array([token, token + 1], np.int32))
            if low == high:
                return
            if k:
                yield self.next[low:high]


class NgramModelLevel:
    """A level whose logits are the logarithms of an n-gram model's probabilities.

    Args:
        store: texts like those to be generated.
        order: longest context in tokens.
        device: where the logits are wanted.
    """

    context_length = UNLIMITED

    def __init__(self, store: TextStore, order: int, device: torch.device | str = "cpu") -> None:
        self.order, self.device = order, device
        self.pairs = count_pairs(store)
        self.single = self.pairs.single.astype(np.float32)
        self.contexts = ContextIndex(store, order)

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
        texts = (tokens[row, : at + 1] for row, at in zip(rows[owners], positions, strict=True))
        probs = np.stack([self.distribution(text) for text in texts])
        return torch.from_numpy(probs).log().to(self.device)

    def distribution(self, text: np.ndarray) -> np.ndarray:
        """[V] float32 probabilities of the token after a text, [n] int32, n at least 1."""
        probs = np.zeros(len(self.single), np.float32)
        rest = 1.0
        for followers, counts in reversed(self._counts(text)):
            share = rest / (counts.sum() + len(counts))
            probs[followers] += share * counts
            rest = share * len(counts)
        probs += np.float32(rest) * self.single
        return probs

    def _counts(self, text: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Distinct tokens [d] seen after the last 1, 2, ... tokens, and how often [d]."""
        first, last = self.pairs.starts[text[-1] : text[-1] + 2]
        stored = [
            self.pairs.following[first:last],
            *self.contexts.followers(text[: -self.order - 1 : -1]),
        ]
        found = []
        for k, here in enumerate(followers_in(text, self.order)):
            there = stored[k] if k < len(stored) else _NONE
            if not len(there) + len(here):
                break
            weights = np.ones(len(there)) if k else self.pairs.counts[first:last]
            weights = np.append(weights, np.full(len(here), OWN_WEIGHT))
            distinct, place = np.unique(np.append(there, here), return_inverse=True)
            found.append((distinct, np.bincount(place, weights)))
        return found


def followers_in(text: np.ndarray, order: int) -> Iterator[np.ndarray]:
    """Tokens that followed earlier occurrences of a text's last 1, 2, ..., `order` tokens.

    Of the latest `OWN_OCCURRENCES` of its last token.
    """
    places = np.flatnonzero(text[:-1] == text[-1])[-OWN_OCCURRENCES:] + 1
    yield text[places]
    for k in range(2, min(order, len(text)) + 1):
        places = places[places >= k]
        places = places[text[places - k] == text[-k]]
        yield text[places]
