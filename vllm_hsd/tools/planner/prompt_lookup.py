"""Replay of lookups over recorded text: vLLM's prompt lookup, and those of `cascade.level`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_hsd.cascade.level import LookupResult, ngram_confidence
from vllm_hsd.tools.lookup_level import LookupLevel, Texts
from vllm_hsd.tools.planner.lookup_choice import LookupChoice

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


class PromptLookup(LookupLevel):
    """`propose` as a level, without vLLM; arguments likewise."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest

    def lookup(self, texts: Texts, requested: Ints) -> LookupResult:
        result = LookupResult.empty(len(requested), int(requested.max(initial=0)))
        for i in np.flatnonzero(requested):
            text = texts.tokens[texts.rows[i], : texts.ends[i]]
            found = propose(text, self.shortest, self.longest, int(requested[i]))
            result.put(i, found, ngram_confidence(len(found)))
        return result


def replay(
    lookup: LookupLevel, context: Ints, text: Ints, max_tokens: int, committed: bool
) -> tuple[Ints, Ints]:
    """Lookups at every position of a text [L], the first right after its context [n].

    Args:
        committed: the text is the target's, so the lookup reads it as it grows; else it is a
            draft, of which the lookup has read only the context.

    Returns:
        tokens that each lookup proposes, and how many of them the text continues with, [L] each.
    """
    table = np.concatenate([context, text])[None].astype(np.int32)
    only, most = np.zeros(1, np.int64), np.array([max_tokens])
    lookup.forget(0)
    lookup.read(Texts(table, only, only, np.array([len(context)])))
    offered, accepted = np.zeros((2, len(text)), dtype=np.int64)
    for position in range(len(text)):
        texts = Texts(table, only, only, np.array([len(context) + position]))
        if committed:
            lookup.read(texts)
        found = lookup.lookup(texts, most)
        draft = found.token_ids[0, : found.counts[0]]
        offered[position], accepted[position] = len(draft), _matching(draft, text[position:])
    return offered, accepted


def replay_choice(
    choice: LookupChoice, texts: Sequence[tuple[Ints, Ints]], max_tokens: int, committed: bool
) -> tuple[Ints, Ints]:
    """Drafts of the best of several lookups along texts.

    What the choice learns depends on where drafts begin, so there is a run for every draft length.
    It learns from text to text, as in serving.

    Args:
        choice: its lookups; what it has learned is not used.
        texts: N of them [at most L], each with its context.
        max_tokens: the longest draft H.
        committed: see `replay`.

    Returns:
        tokens of the draft, and how many of them the text continues with, where a round of each
        draft length begins, [H, N, L]; 0 elsewhere.
    """
    longest = max(len(text) for _, text in texts)
    offered, accepted = np.zeros((2, max_tokens, len(texts), longest), dtype=np.int64)
    only = np.zeros(1, np.int64)
    for n in range(1, max_tokens + 1):
        lookup = choice.fresh()
        for row, (context, text) in enumerate(texts):
            lookup.forget(0)
            table = np.concatenate([context, text])[None].astype(np.int32)
            position = 0
            while position < len(text):
                end = Texts(table, only, only, np.array([len(context) + position]))
                if committed or not position:
                    lookup.read(end)
                found = lookup.lookup(end, np.array([n]))
                draft = found.token_ids[0, : found.counts[0]]
                kept = _matching(draft, text[position:])
                offered[n - 1, row, position], accepted[n - 1, row, position] = len(draft), kept
                position += kept + 1
    return offered, accepted


def _matching(proposal: Ints, text: Ints) -> int:
    """How many tokens of a proposal a text begins with."""
    size = min(len(proposal), len(text))
    same = proposal[:size] == text[:size]
    return size if same.all() else int(same.argmin())
