"""Further drafts of a request beside its chain, which the target verifies in the same pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_hsd.cascade.drafts import DraftStore


class BranchStore:
    """The branches of every slot: further rows of point masses, or drawn as the chain is.

    `rules.branches` says what they are for.

    Args:
        num_slots: requests that can have a draft at the same time.
        rows: drafts of a request that the target verifies together, R, the chain included.
        length: longest draft, L.

    Attributes:
        token_ids: [num_slots, R - 1, L] int64, every row from the first drafted place on.
        counts: [num_slots, R - 1] int64 tokens of each row; 0: no row.
        parent, shared: [num_slots, R - 1] int64, an earlier row (0: the chain) and how many first
            tokens each row shares with it, fewer than it has. What is shared is verified once.
        source: [num_slots, R - 1] int64, of the first token of each row that no row before has.
        most: R, or fewer rows that a cache has room for.
        room: [num_slots] int64, most tokens of a row that can be verified; 0: the chain alone.
        drawn: [num_slots] bool, the rows were drawn independently from probabilities.
        drafts: R - 1 `DraftStore`s over `token_ids` and `counts`, with those probabilities.
    """

    def __init__(self, num_slots: int, rows: int, length: int) -> None:
        self.token_ids = np.zeros((num_slots, rows - 1, length), dtype=np.int64)
        self.counts, self.parent, self.shared, self.source = np.zeros(
            (4, num_slots, rows - 1), dtype=np.int64
        )
        self.most, self.room = rows, np.full(num_slots, length)
        self.drawn = np.zeros(num_slots, dtype=bool)
        self.drafts = [DraftStore(num_slots, length) for _ in range(rows - 1)]
        for row, drafts in enumerate(self.drafts):
            drafts.token_ids, drafts.counts = self.token_ids[:, row], self.counts[:, row]

    def clear(self, slots: np.ndarray | int) -> None:
        """Take the branches of `slots` away."""
        self.counts[slots] = self.parent[slots] = self.shared[slots] = 0
        self.drawn[slots] = False

    def share(self, chain: DraftStore, slots: np.ndarray) -> None:
        """Note what rows of `slots` share with earlier ones, of each all but its last token."""
        counts = np.concatenate([chain.counts[slots, None], self.counts[slots]], axis=1)
        rows = np.concatenate([chain.token_ids[slots, None], self.token_ids[slots]], axis=1)
        some, place = np.arange(len(slots)), np.arange(rows.shape[2])
        for r in range(1, counts.shape[1]):
            both = np.minimum(counts[:, :r], np.maximum(counts[:, r, None] - 1, 0))
            same = (rows[:, :r] == rows[:, r, None]) & (place < both[..., None])
            common = np.logical_and.accumulate(same, axis=2).sum(2)
            self.parent[slots, r - 1] = parent = common.argmax(1)
            self.shared[slots, r - 1] = common[some, parent]

    def drawn_rows(
        self, chain: DraftStore, slot: int, counts: Sequence[int]
    ) -> tuple[list[list[int]], torch.Tensor]:
        """The first counts[r] tokens of every row, the chain's first, and their probabilities.

        Args:
            chain: the store of the chains.
            slot: a slot of drawn rows.
            counts: [R].

        Returns:
            (R lists of token ids; [sum(counts), V] what each one was drawn from).
        """
        tokens, probs = [], []
        for drafts, count in zip((chain, *self.drafts), counts, strict=True):
            first = slot * drafts.length
            tokens.append(drafts.token_ids[slot, :count].tolist())
            if drafts.probs is not None:
                probs.append(drafts.probs[first : first + count])
        return tokens, torch.cat(probs)
