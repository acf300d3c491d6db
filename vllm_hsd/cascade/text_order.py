"""The texts of a store in the order of their continuations: a suffix array, kept on a device.

What follows any context of up to `DEPTH` tokens lies in one interval of it, and so does what
follows each of its continuations: counts are lengths of intervals, found by binary search. Built by
prefix doubling (Manber and Myers, "Suffix Arrays: A New Method for On-Line String Searches", 1993),
six sorts of the whole store.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vllm_hsd.cascade.text_store import TextStore

# Longest match and continuation together.
DEPTH = 64
# Occurrences of a match in the request's own text that are counted, the latest ones.
OCCURRENCES = 256
# Evenly spaced places of an interval of a store that are looked at: a continuation with one in so
# many of its occurrences has one of them, and is then counted exactly.
PROBES = 128
# After the last token of a text: no continuation spans two of them.
END_OF_TEXT = -1


class OrderedTexts(NamedTuple):
    """Texts and their order.

    Attributes:
        tokens: int32 [T + D], the texts, `END_OF_TEXT` after each of the D.
        order: int32 [T], where the texts' tokens lie in `tokens`, in the lexicographic order of the
            `DEPTH` tokens from there on; a text's end comes before any token.
    """

    tokens: torch.Tensor
    order: torch.Tensor


def order_texts(store: TextStore, device: torch.device | str) -> OrderedTexts:
    """Sort a store's texts on the device that will search them; 8 bytes a token stay there."""
    ends = np.insert(store.tokens, store.starts[1:], END_OF_TEXT)
    tokens = torch.from_numpy(ends.astype(np.int32)).to(device)
    # Of the next `length` tokens from each place on; twice as many after each sort.
    order = rank = tokens.long() + 1
    for length in (1 << k for k in range(DEPTH.bit_length() - 1)):
        following = torch.zeros_like(rank)
        following[:-length] = rank[length:]
        keys, order = rank.mul_(rank.max() + 1).add_(following).sort()
        rank[order] = torch.cumsum(keys != keys.roll(1), 0) - int(keys[0] != keys[-1])
    # The ends of texts are before all tokens.
    return OrderedTexts(tokens, order[len(store.starts) - 1 :].int())
