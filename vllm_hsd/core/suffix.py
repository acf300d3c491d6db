"""A suffix level: the likeliest continuation of the text's end in suffix trees.

After Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications"
(arXiv:2411.04975), on the trees of arctic-inference: one of each request's own text, one of earlier
outputs of the server where that is configured, and one of a store that was written ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_hsd.core.levels import LookupLevel, LookupResult, Texts
from vllm_hsd.core.text_order import DEPTH
from vllm_hsd.core.text_store import TextStore
from vllm_hsd.errors import UserError

# A tree's draft may be so many times as long as the match, which is its largest useful length.
UNBOUNDED = 1000.0


def suffix_tree_class() -> Any:
    """The class of arctic-inference's trees.

    Raises:
        UserError: the package is not installed.
    """
    try:
        from arctic_inference.suffix_decoding.cache import SuffixTree
    except ImportError as error:
        raise UserError(
            "suffix needs the package arctic-inference, whose installation compiles C++: "
            "`pip install 'vllm-hsd[suffix]'`."
        ) from error
    return SuffixTree


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


class SuffixLookup(LookupLevel):
    """A lookup in `num_texts` texts for each request, the first one the request's own.

    Attributes:
        min_acceptance: a draft ends before the token that is less likely to be accepted.
    """

    num_texts: int
    min_acceptance: float

    def continuations(self, text: np.ndarray, slot: int, room: int) -> list[Continuation]:
        """In each text the likeliest one of the slot's [n] int32 `text`, of at most `room` tokens.

        The end of `text` may be unverified.
        """
        raise NotImplementedError

    def lookup(self, texts: Texts, requested: np.ndarray) -> LookupResult:
        """See `core.levels.LookupLevel`: the one that is expected to give most."""
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


class SuffixLevel(SuffixLookup):
    """Lookup in the request's own text, in earlier outputs, and in a store.

    Args:
        store: texts written ahead, None for none.
        shared_tokens: most tokens of earlier outputs that are kept, the oldest go first; 0 keeps
            every request to its own text and the store.
        min_acceptance: a draft ends before the token that is less likely to be accepted.

    Raises:
        UserError: arctic-inference is not installed.
    """

    def __init__(
        self,
        store: TextStore | None = None,
        shared_tokens: int = 0,
        min_acceptance: float = 0.05,
    ) -> None:
        self.tree = suffix_tree_class()
        self.min_acceptance = min_acceptance
        self.store = None
        if store is not None:
            self.store = self.tree(DEPTH)
            for number, text in enumerate(store):
                self.store.extend_ndarray(number, np.ascontiguousarray(text))
        self.shared = SharedOutputs(self.tree(DEPTH), shared_tokens) if shared_tokens else None
        self.others = [tree for tree in (self.shared and self.shared.tree, self.store) if tree]
        self.num_texts = 1 + len(self.others)
        # Tree of a slot's text and how much of the text it holds.
        self.own: dict[int, tuple[Any, int]] = {}

    def read(self, texts: Texts) -> None:
        """See `core.levels.LookupLevel`."""
        each = (part.tolist() for part in texts[1:])
        for row, slot, end in zip(*each, strict=True):
            known = slot in self.own
            tree, begin = self.own[slot] if known else (self.tree(DEPTH), 0)
            tokens = texts.tokens[row]
            tree.extend_ndarray(0, np.ascontiguousarray(tokens[begin:end]))
            self.own[slot] = tree, end
            if self.shared is not None:
                # What a request brings along is its prompt, which is never shared.
                self.shared.add(slot, np.ascontiguousarray(tokens[begin if known else end : end]))

    def continuations(self, text: np.ndarray, slot: int, room: int) -> list[Continuation]:
        """See `SuffixLookup`."""
        context, found = np.ascontiguousarray(text[-DEPTH:]), []
        for tree in (self.own[slot][0], *self.others):
            draft = tree.speculate_ndarray(
                context, room, UNBOUNDED, 0.0, self.min_acceptance, False
            )
            probs = np.array(draft.probs, dtype=np.float64)
            found.append(Continuation(draft.token_ids, probs, draft.match_len))
        return found

    def forget(self, slot: int) -> None:
        """See `core.levels.LookupLevel`; of a request that comes back the tree is built again."""
        self.own.pop(slot, None)
        if self.shared is not None:
            self.shared.end(slot)


class SharedOutputs:
    """One tree of the outputs of many requests, the oldest of which go first.

    Args:
        tree: an empty tree.
        limit: most tokens to keep.
    """

    def __init__(self, tree: Any, limit: int) -> None:
        self.tree, self.limit = tree, limit
        self.number_of: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        self.order: deque[int] = deque()
        self.total = 0
        self.next = 0

    def add(self, slot: int, tokens: np.ndarray) -> None:
        """Continue the output of the request in a slot: [n] int32."""
        if slot not in self.number_of:
            self.number_of[slot], self.next = self.next, (self.next + 1) % (1 << 31)
            self.lengths[self.number_of[slot]] = 0
            self.order.append(self.number_of[slot])
        number = self.number_of[slot]
        if not len(tokens) or number not in self.lengths:
            return
        self.tree.extend_ndarray(number, tokens)
        self.lengths[number] += len(tokens)
        self.total += len(tokens)
        while self.total > self.limit:
            oldest = self.order.popleft()
            length = self.lengths.pop(oldest)
            self.total -= length
            if length:
                self.tree.remove(oldest)

    def end(self, slot: int) -> None:
        """The slot's request has ended; its output stays."""
        number = self.number_of.pop(slot, None)
        if number is not None and self.lengths.get(number) == 0:
            del self.lengths[number]
            self.order.remove(number)


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
