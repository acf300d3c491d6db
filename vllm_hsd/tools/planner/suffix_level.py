"""A suffix level in plain numpy: the likeliest continuation of the text's end in several texts.

After Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications"
(arXiv:2411.04975). What the kernels of `cascade.suffix_lookup`, which serves, compute, number for
number; its docstring has the rule. The planner replays it over recorded text.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from vllm_hsd.cascade.level import LookupResult
from vllm_hsd.cascade.text_order import DEPTH, END_OF_TEXT, OCCURRENCES, PROBES, OrderedTexts
from vllm_hsd.tools.lookup_level import LookupLevel, Texts


class Continuation(NamedTuple):
    """What is likeliest after a match.

    Attributes:
        token_ids: n of them.
        probs: [n] float64 shares of the occurrences, not increasing.
        match: tokens before it that were found.
    """

    token_ids: Sequence[int] | np.ndarray
    probs: np.ndarray
    match: int


class SuffixLevel(LookupLevel):
    """Lookup in the request's own text, in shared outputs and in a store.

    Args:
        texts: the store in order, on the host; None for none.
        min_acceptance: a draft ends before the token that is less likely to be accepted.
        shared: [N] int32, outputs of other requests, `END_OF_TEXT` between them; None for none.
    """

    def __init__(
        self,
        texts: OrderedTexts | None = None,
        min_acceptance: float = 0.05,
        shared: np.ndarray | None = None,
    ) -> None:
        self.texts, self.min_acceptance, self.shared = texts, min_acceptance, shared
        self.num_texts = 1 + (shared is not None) + (texts is not None)
        # Tokens of a slot's text that are committed.
        self.committed: dict[int, int] = {}

    def read(self, texts: Texts) -> None:
        self.committed.update(zip(texts.slots.tolist(), texts.ends.tolist(), strict=True))

    def lookup(self, texts: Texts, requested: np.ndarray) -> LookupResult:
        """The continuation that is expected to give most."""
        result = LookupResult.empty(len(requested), int(requested.max(initial=0)))
        for i, found in self._found(texts, requested):
            token_ids, confidence = max(found, key=lambda each: each[1].sum())
            result.put(i, token_ids, confidence)
        return result

    def lookup_each(self, texts: Texts, requested: np.ndarray) -> list[LookupResult]:
        """As `lookup`, in each text."""
        shape = len(requested), int(requested.max(initial=0))
        each = [LookupResult.empty(*shape) for _ in range(self.num_texts)]
        for i, found in self._found(texts, requested):
            for result, (token_ids, confidence) in zip(each, found, strict=True):
                result.put(i, token_ids, confidence)
        return each

    def _found(
        self, texts: Texts, requested: np.ndarray
    ) -> Iterator[tuple[int, list[tuple[Sequence[int] | np.ndarray, np.ndarray]]]]:
        """Which text, and what each of the slot's texts has after it: token ids, confidence."""
        for i in np.flatnonzero(requested):
            text = texts.tokens[texts.rows[i], : texts.ends[i]]
            found = []
            drafts = self.continuations(text, int(texts.slots[i]), int(requested[i]))
            for source, draft in enumerate(drafts):
                confidence = acceptance(draft.probs, draft.match, own=source == 0)
                count = int((confidence >= self.min_acceptance).sum())
                found.append((draft.token_ids[:count], confidence[:count]))
            yield i, found

    def continuations(self, text: np.ndarray, slot: int, room: int) -> list[Continuation]:
        """In each text the likeliest one of the slot's [n] int32 `text`, of at most `room` tokens.

        The end of `text` may be unverified.
        """
        context = text[-DEPTH:]
        committed = np.append(text[: self.committed[slot]], np.int32(END_OF_TEXT))
        drafts = [self._likeliest(committed, own_occurrences(committed, context), room)]
        if self.shared is not None:
            shared = np.append(self.shared, np.int32(END_OF_TEXT))
            drafts.append(self._likeliest(shared, own_occurrences(shared, context), room))
        if self.texts is not None:
            stored = self.texts.tokens.numpy()
            found = stored_occurrences(stored, self.texts.order.numpy(), context)
            drafts.append(self._likeliest(stored, found, room))
        return drafts

    def _likeliest(
        self, tokens: np.ndarray, occurrences: Iterator[np.ndarray], room: int
    ) -> Continuation:
        """The continuation with the largest sum of shares, after the longest match of those."""
        floor = np.maximum(np.float32(self.min_acceptance), np.float32(1 / PROBES))
        best, most = Continuation(np.zeros(0, np.int64), np.zeros(0, np.float32), 0), np.float32(0)
        for match, places in enumerate(occurrences, 1):
            found = continuation(tokens, places, match, min(room, DEPTH - match), floor)
            expected = np.float32(0)
            for prob in found.probs:
                expected += prob
            if expected >= most:
                best, most = found, expected
        return best


def own_occurrences(text: np.ndarray, context: np.ndarray) -> Iterator[np.ndarray]:
    """Where a text goes on after the last 1, 2, ... tokens of a context, as long as it has them.

    Args:
        text: [N + 1] int32, the last one `END_OF_TEXT`; others end texts in it.
        context: [up to `DEPTH`] int32; the first token of it is never matched.

    Yields:
        [up to `OCCURRENCES`] int64, the last ones.
    """
    places = np.flatnonzero(text[:-1] == context[-1])
    for match in range(1, len(context)):
        places = places[places >= match - 1]
        places = places[text[places - match + 1] == context[-match]]
        if not len(places):
            return
        yield places[-OCCURRENCES:] + 1


def stored_occurrences(
    tokens: np.ndarray, order: np.ndarray, context: np.ndarray
) -> Iterator[np.ndarray]:
    """As `own_occurrences` of the texts of a store, all of them."""
    for match in range(1, len(context)):
        low, high = 0, len(order)
        for k, token in enumerate(context[-match:].tolist()):
            at = partial(_token_at, tokens, k)
            low = bisect_left(order, token, low, high, key=at)
            high = bisect_right(order, token, low, high, key=at)
        if low == high:
            return
        yield order[low:high].astype(np.int64) + match


def _token_at(tokens: np.ndarray, offset: int, place: int) -> int:
    return int(tokens[place + offset])


def continuation(
    tokens: np.ndarray, places: np.ndarray, match: int, room: int, floor: np.float32
) -> Continuation:
    """Take the token seen most often, then the one seen most often after both, and so on.

    Args:
        tokens: [N] int32, `END_OF_TEXT` after every text.
        places: [n] int64, where the texts go on after the match.
        match: tokens before them.
        room: most tokens.
        floor: least share of all occurrences.
    """
    prob = np.float32(1)
    token_ids: list[int] = []
    probs: list[np.float32] = []
    while len(token_ids) < room:
        here = tokens[places]
        inside = here[here != END_OF_TEXT]
        if not len(inside):
            break
        distinct, votes = np.unique(inside, return_counts=True)
        taken = votes.argmax()
        prob = prob * (np.float32(votes[taken]) / np.float32(len(places)))
        if prob < floor:
            break
        token_ids.append(int(distinct[taken]))
        probs.append(prob)
        places = places[here == distinct[taken]] + 1
    return Continuation(np.array(token_ids, np.int64), np.array(probs, np.float32), match)


def acceptance(probs: np.ndarray, match: int, *, own: bool) -> np.ndarray:
    """Estimated probability that the text continues with the first tokens of a tree's draft.

    A tree's probabilities are shares of what it has seen, mostly once: after a short match they
    promise too much, in another text more than in one's own. Fitted to greedy and sampled answers
    of a chat model of 135 million parameters.

    Args:
        probs: [n] float64, the tree's probabilities of the first tokens.
        match: tokens before the draft that the tree has seen.
        own: the tree is of the request's own text.

    Returns:
        [n] float64, decreasing.
    """
    # Products of (s + 1) / (s + 2) and of s / (s + 4) over the tokens seen before each one.
    first, last = float(match), match + np.arange(len(probs), dtype=np.float64)
    if own:
        return probs * ((first + 1) / (last + 2))
    before = first * (first + 1) * (first + 2) * (first + 3)
    return probs * (before / ((last + 1) * (last + 2) * (last + 3) * (last + 4)))
