"""Levels of `cascade.bigram` in plain numpy, as the planner runs them over recorded text."""

from __future__ import annotations

import numpy as np
import torch

from vllm_hsd.cascade.bigram import count_pairs, successors
from vllm_hsd.cascade.level import LookupResult
from vllm_hsd.cascade.ragged import last_positions
from vllm_hsd.cascade.text_store import TextStore
from vllm_hsd.tools.lookup_level import UNLIMITED, LookupLevel, Texts


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
    ) -> torch.Tensor:
        owners, positions = last_positions(starts + counts, num_logits)
        return self.logits(tokens[rows[owners], positions])

    def logits(self, last: np.ndarray) -> torch.Tensor:
        """Of what follows tokens, [...] int: [..., V] float32."""
        found = np.empty((*last.shape, len(self.pairs.single)), np.float32)
        for place in np.ndindex(last.shape):
            found[place] = np.log(self.pairs.distribution(int(last[place])))
        return torch.from_numpy(found).to(self.device)
