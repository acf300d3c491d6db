"""Preallocated drafts, one slot per request, with their proposal probabilities."""

from __future__ import annotations

import numpy as np
import torch

from vllm_hsd.cascade.ragged import ragged_arange, ragged_starts
from vllm_hsd.rules.inputs import ChainBatch


class DraftStore:
    """The drafts of one level.

    Probabilities are in one `[num_slots, length, V]` array that the first `append` with some
    allocates; slots that are never written take no memory on a CPU.

    Args:
        num_slots: requests that can have a draft at the same time.
        length: longest draft.

    Attributes:
        token_ids: [num_slots, length] int64; slot s owns the first counts[s].
        counts: [num_slots] int64.
        point_mass: [num_slots, length] bool, the token was certain: it has no probabilities.
        level: [num_slots, length] int64, the level that drafted the token.
        entropy: [num_slots, length] float64 nats, NaN where it was not needed.
        probs: [num_slots * length, V] proposal probabilities, None before the first.
    """

    def __init__(self, num_slots: int, length: int) -> None:
        self.length = length
        self.token_ids = np.zeros((num_slots, length), dtype=np.int64)
        self.counts = np.zeros(num_slots, dtype=np.int64)
        self.point_mass = np.zeros((num_slots, length), dtype=bool)
        self.level = np.zeros((num_slots, length), dtype=np.int64)
        self.entropy = np.full((num_slots, length), np.nan)
        self.probs: torch.Tensor | None = None

    def clear(self, slots: np.ndarray | int) -> None:
        self.counts[slots] = 0

    def append(
        self,
        slots: np.ndarray,
        token_ids: np.ndarray,
        emitted: np.ndarray,
        probs: torch.Tensor | None,
        first_row: np.ndarray,
        level: int,
        entropy: np.ndarray,
    ) -> None:
        """Add the first emitted[j] of token_ids[j] to the draft of slots[j].

        Args:
            slots: [n] int64.
            token_ids: [n, width] int64.
            emitted: [n] int64.
            probs: [R, V]; rows first_row[j], first_row[j] + 1, ... belong to slots[j]. None where
                every token is certain.
            first_row: [n] int64.
            level: the level that drafted them.
            entropy: [R] float64 entropies of the rows.
        """
        owners, offsets = ragged_arange(emitted)
        place = (slots[owners], self.counts[slots][owners] + offsets)
        rows = first_row[owners] + offsets
        self.token_ids[place] = token_ids[owners, offsets]
        self.level[place] = level
        self.entropy[place] = entropy[rows]
        self.point_mass[place] = probs is None
        self.counts[slots] += emitted
        if probs is not None:
            self._write(place, probs, rows)

    def extend(self, other: DraftStore, slots: np.ndarray) -> None:
        """Append the drafts of another store for the same slots."""
        owners, offsets = ragged_arange(other.counts[slots])
        source = (slots[owners], offsets)
        place = (slots[owners], self.counts[slots][owners] + offsets)
        for mine, theirs in (
            (self.token_ids, other.token_ids),
            (self.level, other.level),
            (self.entropy, other.entropy),
            (self.point_mass, other.point_mass),
        ):
            mine[place] = theirs[source]
        self.counts[slots] += other.counts[slots]
        drawn = ~other.point_mass[source]
        if other.probs is not None and drawn.any():
            rows = (source[0] * other.length + source[1])[drawn]
            self._write((place[0][drawn], place[1][drawn]), other.probs, rows)

    def rows(self, slots: np.ndarray, width: int) -> np.ndarray:
        """[n, width] int64 rows of `probs` of the first tokens, -1 where the token was certain."""
        rows = slots[:, None] * self.length + np.arange(width)
        return np.where(self.point_mass[slots, :width], -1, rows)

    def chain_batch(self, slots: np.ndarray, probs: torch.Tensor) -> ChainBatch:
        """The drafts in slots, [batch] int64, to be verified where they are.

        Args:
            probs: [sum(lengths + 1), V] target probabilities or logits, request after request; the
                last row of each also stands for all later positions.
        """
        lengths = self.counts[slots]
        width = int(lengths.max(initial=0))
        positions = np.minimum(np.arange(width + 1), lengths[:, None])
        return ChainBatch(
            target_probs=probs,
            target_rows=ragged_starts(lengths + 1)[:, None] + positions,
            draft_probs=self.probs,
            draft_rows=self.rows(slots, width),
            tokens=self.token_ids[slots, :width],
            lengths=lengths,
        )

    def _write(
        self, place: tuple[np.ndarray, np.ndarray], probs: torch.Tensor, rows: np.ndarray
    ) -> None:
        if self.probs is None:
            self.probs = probs.new_empty(self.token_ids.size, probs.shape[1])
        if not np.array_equal(rows, np.arange(len(probs))):
            probs = probs.index_select(0, torch.from_numpy(rows).to(probs.device))
        index = torch.from_numpy(place[0] * self.length + place[1])
        self.probs.index_copy_(0, index.to(probs.device), probs)
