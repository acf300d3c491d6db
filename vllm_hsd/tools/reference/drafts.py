"""Drafts of a level, one slot per request, with what their tokens were drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_hsd.cascade.ragged import ragged_arange
from vllm_hsd.rules.chain import verify_chain
from vllm_hsd.rules.residual import point_masses


class DraftStore:
    """The drafts of one level.

    Args:
        num_slots: requests that can have a draft at the same time.
        length: longest draft.

    Attributes:
        token_ids: [num_slots, length] int64; slot s owns the first counts[s].
        counts: [num_slots] int64.
        level: [num_slots, length] int64, the level that drafted the token.
        entropy: [num_slots, length] float64 nats, NaN where it was not needed.
        proposals: by slot, the row [V] that each token was drawn from; None for a point mass.
    """

    def __init__(self, num_slots: int, length: int) -> None:
        self.length = length
        self.token_ids = np.zeros((num_slots, length), dtype=np.int64)
        self.counts = np.zeros(num_slots, dtype=np.int64)
        self.level = np.zeros((num_slots, length), dtype=np.int64)
        self.entropy = np.full((num_slots, length), np.nan)
        self.proposals: list[list[torch.Tensor | None]] = [[] for _ in range(num_slots)]

    def clear(self, slots: np.ndarray) -> None:
        self.counts[slots] = 0
        for slot in slots.tolist():
            self.proposals[slot] = []

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
        self.token_ids[place] = token_ids[owners, offsets]
        self.level[place] = level
        self.entropy[place] = entropy[first_row[owners] + offsets]
        self.counts[slots] += emitted
        for slot, first, count in zip(slots.tolist(), first_row, emitted, strict=True):
            own = [None] * count if probs is None else probs[first : first + count]
            self.proposals[slot] += own

    def extend(self, other: DraftStore, slots: np.ndarray) -> None:
        """Append the drafts of another store for the same slots."""
        owners, offsets = ragged_arange(other.counts[slots])
        source = (slots[owners], offsets)
        place = (slots[owners], self.counts[slots][owners] + offsets)
        for mine, theirs in (
            (self.token_ids, other.token_ids),
            (self.level, other.level),
            (self.entropy, other.entropy),
        ):
            mine[place] = theirs[source]
        self.counts[slots] += other.counts[slots]
        for slot in slots.tolist():
            self.proposals[slot] += other.proposals[slot]

    def verify(
        self, slot: int, rows: torch.Tensor, uniforms: Sequence[float] | None, method: str
    ) -> tuple[list[int], int]:
        """As `rules.chain.verify_chain`, of the draft in a slot.

        Args:
            rows: [n + 1, V] of the verifier; logits where there are no uniforms.
            uniforms: n + 1; None to accept what is the argmax.
            method: "block" or "standard".
        """
        drafted = self.token_ids[slot, : self.counts[slot]]
        token_ids = drafted.tolist()
        if uniforms is None:
            best = rows.argmax(-1).tolist()
            accepted = next((t for t, x in enumerate(token_ids) if x != best[t]), len(token_ids))
            return [*token_ids[:accepted], best[accepted]], accepted
        proposals = point_masses(torch.from_numpy(drafted), rows.shape[1])
        for own, proposal in zip(proposals, self.proposals[slot], strict=True):
            if proposal is not None:
                own.copy_(proposal)
        return verify_chain(rows, proposals, token_ids, uniforms, method=method)
