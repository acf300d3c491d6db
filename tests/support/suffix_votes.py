"""The suffix lookup of the V2 runner in plain numpy: what its kernels compute, number for number.

See `runner_v2.suffix_lookup` for the rule.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import partial

import numpy as np

from vllm_hsd.core.levels import Texts
from vllm_hsd.core.suffix import Continuation, SuffixLookup
from vllm_hsd.core.text_order import DEPTH, END_OF_TEXT, OCCURRENCES, PROBES, OrderedTexts


class SuffixVotes(SuffixLookup):
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
        """See `core.levels.LookupLevel`."""
        self.committed.update(zip(texts.slots.tolist(), texts.ends.tolist(), strict=True))

    def continuations(self, text: np.ndarray, slot: int, room: int) -> list[Continuation]:
        """See `SuffixLookup`."""
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
