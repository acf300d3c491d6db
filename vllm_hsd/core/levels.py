"""What a cascade is made of: the protocols of its levels, their options and their counts."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

import numpy as np
import torch

UNLIMITED = sys.maxsize


class Level(Protocol):
    """A drafter that turns tokens into next-token logits.

    Attributes:
        keeps_cache: it has a KV cache of its own, to be filled for every committed token.
        context_length: longest text in tokens that it can read; it sits out for longer ones.
    """

    keeps_cache: bool
    context_length: int

    def forward(
        self,
        tokens: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        num_logits: np.ndarray,
    ) -> torch.Tensor | None:
        """Feed `tokens[rows[i], starts[i] : starts[i] + counts[i]]` of every request i.

        Args:
            tokens: [table rows, max length] int32, the host's table of token ids.
            rows: [batch] int64, row of each request in `tokens`.
            starts, counts: [batch] int64, positions to compute; the cache is valid before them.
            num_logits: [batch] int64, how many of the last computed positions yield logits.

        Returns:
            [sum(num_logits), V] logits, request after request; None when all counts are zero.
        """


@runtime_checkable
class LookupLevel(Protocol):
    """A lowest level that finds its drafts in the text: its proposals are point masses."""

    def lookup(
        self, tokens: np.ndarray, rows: np.ndarray, ends: np.ndarray, requested: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Continue `tokens[rows[i], : ends[i]]` by at most requested[i] tokens.

        Returns:
            token ids [batch, max(requested)] int64 and how many of them hold, [batch] int64.
        """


@dataclass
class LevelOptions:
    """How one level takes part in a cascade.

    Attributes:
        draft_length: most tokens proposed to the level above per call.
        verifier: "block" or "standard", how it verifies the level below.
        max_rounds: most drafts taken from below per call; None until the draft is full.
        stopping: "fixed", or "entropy" to stop after a token drawn from an uncertain distribution;
            a level that verifies another one stops after a round that shows such a distribution.
        temperature_scale: factor on the request's temperature for this level.
    """

    draft_length: int
    verifier: str = "block"
    max_rounds: int | None = None
    stopping: str = "fixed"
    temperature_scale: float = 1.0


@dataclass
class LevelStats:
    """Counts of one level; `drafted` tokens were proposed to the next model up."""

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    forwards: int = 0
    forward_seconds: float = 0.0

    def __add__(self, other: LevelStats) -> LevelStats:
        names = [field.name for field in fields(self)]
        return LevelStats(**{name: getattr(self, name) + getattr(other, name) for name in names})
