"""Replay of lookups over recorded text: vLLM's prompt lookup, and those of `core.levels`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from vllm_hsd.core.levels import LookupLevel, Texts

Ints = NDArray[np.int64]


def propose(tokens: Ints, shortest: int, longest: int, max_tokens: int) -> Ints:
    """At most `max_tokens` that followed the last of `tokens` [n] when they occurred before.

    As in vLLM's n-gram proposer: the longest suffix of `shortest` to `longest` tokens that
    occurred before decides, and its earliest occurrence is continued.
    """
    total = len(tokens)
    for length in range(min(longest, total - 1), shortest - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
        found = np.flatnonzero((windows == tokens[total - length :]).all(1))
        if len(found):
            start = found[0] + length
            return tokens[start : start + max_tokens]
    return tokens[:0]


def replay(
    context: Ints, text: Ints, shortest: int, longest: int, max_tokens: int
) -> tuple[Ints, Ints]:
    """Lookups at every position of a text [L], the first right after its context [n].

    Returns:
        tokens that each lookup proposes, and how many of them the text continues with, [L] each.
    """
    whole = np.concatenate([context, text])
    proposals = (
        propose(whole[: len(context) + position], shortest, longest, max_tokens)
        for position in range(len(text))
    )
    return compared(proposals, text)


def replay_level(
    lookup: LookupLevel, context: Ints, text: Ints, max_tokens: int, committed: bool
) -> tuple[Ints, Ints]:
    """As `replay`, of a lookup of `core.levels`.

    Args:
        committed: the text is the target's, so the lookup reads it as it grows; else it is a
            draft, of which the lookup has read only the context.
    """
    table = np.concatenate([context, text])[None].astype(np.int32)
    only, most = np.zeros(1, np.int64), np.array([max_tokens])
    lookup.forget(0)
    lookup.read(Texts(table, only, only, np.array([len(context)])))

    def proposals() -> Iterator[Ints]:
        for position in range(len(text)):
            texts = Texts(table, only, only, np.array([len(context) + position]))
            if committed:
                lookup.read(texts)
            found = lookup.lookup(texts, most)
            yield found.token_ids[0, : found.counts[0]]

    return compared(proposals(), text)


def compared(proposals: Iterable[Ints], text: Ints) -> tuple[Ints, Ints]:
    """Tokens of the proposal before each token of a text [L], and how many of them it has, [L]."""
    offered, accepted = np.zeros((2, len(text)), dtype=np.int64)
    for position, proposal in enumerate(proposals):
        offered[position] = len(proposal)
        follows = text[position : position + len(proposal)]
        same = proposal[: len(follows)] == follows
        accepted[position] = len(same) if same.all() else same.argmin()
    return offered, accepted
