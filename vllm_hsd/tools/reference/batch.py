"""What the reference's cascade drafts for, and the models that it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vllm_hsd.tools.lookup_level import Texts
from vllm_hsd.tools.reference.stopping import EntropyThresholds


class Level(Protocol):
    """A model that turns tokens into next-token logits.

    Attributes:
        context_length: longest text in tokens that it can read; it sits out for longer ones.
    """

    context_length: int

    def forward(
        self,
        tokens: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        num_logits: np.ndarray,
    ) -> torch.Tensor:
        """Feed `tokens[rows[i], starts[i] : starts[i] + counts[i]]` of every request i.

        Args:
            tokens: [table rows, max length] int32, the host's table of token ids.
            rows: [batch] int64, row of each request in `tokens`.
            starts, counts: [batch] int64, positions to compute, one at least; the cache is valid
                before them.
            num_logits: [batch] int64, how many of the last computed positions yield logits.

        Returns:
            [sum(num_logits), V] logits, request after request.
        """


@dataclass
class DraftBatch:
    """The requests that a cascade drafts for in one step; every array is indexed by slot.

    Attributes:
        tokens: [slots, max length] int32; drafts are written after the committed tokens.
        end: [slots] int64, tokens in the text, first the committed ones; grows while drafting.
        cached: [levels, slots] int64, positions whose KV entries are valid; updated in place.
        eos: [slots] int64, token that ends the request, -1 for none; drafts end with it.
        greedy: every request takes the argmax: no probabilities are built.
        probs: (logits [n, V], slots [n], level) -> [n, V] probabilities that the level samples
            from and is verified by.
        uniforms: (slots [b], counts [b], level) -> [sum(counts)] float64, each used once.
        thresholds: entropy thresholds per level and slot; updated in place.
    """

    tokens: np.ndarray
    end: np.ndarray
    cached: np.ndarray
    eos: np.ndarray
    greedy: bool
    probs: Callable[[torch.Tensor, np.ndarray, int], torch.Tensor]
    uniforms: Callable[[np.ndarray, np.ndarray, int], np.ndarray]
    thresholds: EntropyThresholds

    def texts(self, slots: np.ndarray) -> Texts:
        """Of the requests in [n] slots."""
        return Texts(self.tokens, slots, slots, self.end[slots])
