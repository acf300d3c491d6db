"""Replay of vLLM's prompt lookup over recorded text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
    offered, accepted = np.zeros((2, len(text)), dtype=np.int64)
    for position in range(len(text)):
        proposal = propose(whole[: len(context) + position], shortest, longest, max_tokens)
        offered[position] = len(proposal)
        follows = text[position : position + len(proposal)]
        same = proposal[: len(follows)] == follows
        accepted[position] = len(same) if same.all() else same.argmin()
    return offered, accepted
