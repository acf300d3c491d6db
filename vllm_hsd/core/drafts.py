"""Ragged drafts with the laws that their tokens were drawn from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch


@dataclass
class Proposal:
    """A ragged draft with the law that each of its tokens was drawn from.

    Attributes:
        token_ids: [batch, width] int64; request i owns the first counts[i].
        counts: [batch] int64.
        source: [batch, width] int64, row of `laws` that token was drawn from.
        laws: [n, V] float32 proposal rows; None when all rows are one-hot.
        entropy: [batch, width] float64 entropies of the rows, nan where the window needs none.
        verified: [batch] int64, tokens that are the level's own; the rest is the unverified tail.
    """

    token_ids: np.ndarray
    counts: np.ndarray
    source: np.ndarray
    laws: torch.Tensor | None
    entropy: np.ndarray
    verified: np.ndarray

    def flat_token_ids(self) -> np.ndarray:
        """[sum(counts)] int64, request after request."""
        return self.token_ids[_filled(self.counts, self.token_ids.shape[1])]

    def flat_laws(self) -> torch.Tensor | None:
        """[sum(counts), V] proposal rows, request after request."""
        if self.laws is None:
            return None
        index = torch.from_numpy(self.source[_filled(self.counts, self.source.shape[1])])
        return self.laws.index_select(0, index.to(self.laws.device))

    def with_laws(self, like: torch.Tensor) -> Proposal:
        """The same draft with its one-hot rows written out, of the width and dtype of `like`."""
        if self.laws is not None:
            return self
        token_ids = torch.from_numpy(self.flat_token_ids()).to(like.device)
        laws = torch.nn.functional.one_hot(token_ids, like.shape[1]).to(like.dtype)
        source = np.zeros_like(self.source)
        source[_filled(self.counts, source.shape[1])] = np.arange(len(token_ids))
        return replace(self, laws=laws, source=source)


class DraftBuffer:
    """Tokens of a level's call as they come, with the place of each one's law."""

    def __init__(self, batch: int, width: int) -> None:
        self.token_ids = np.zeros((batch, width), dtype=np.int64)
        self.source = np.zeros((batch, width), dtype=np.int64)
        self.entropy = np.full((batch, width), np.nan)
        self.counts = np.zeros(batch, dtype=np.int64)
        self.laws: list[torch.Tensor] = []
        self.num_laws = 0

    def append(
        self,
        active: np.ndarray,
        token_ids: np.ndarray,
        emitted: np.ndarray,
        laws: torch.Tensor | None,
        first_law: np.ndarray,
        entropy: np.ndarray,
    ) -> None:
        """Add the first emitted[j] of token_ids[j] to request active[j].

        Their laws are the rows first_law[j], first_law[j] + 1, ... of `laws`, whose entropies
        are `entropy`.
        """
        owners, offsets = ragged_arange(emitted)
        place = (active[owners], self.counts[active][owners] + offsets)
        law = first_law[owners] + offsets
        self.token_ids[place] = token_ids[owners, offsets]
        self.source[place] = self.num_laws + law
        self.entropy[place] = entropy[law]
        self.counts[active] += emitted
        if laws is not None:
            self.laws.append(laws)
            self.num_laws += len(laws)

    def proposal(self) -> Proposal:
        laws = None
        if self.laws:
            laws = self.laws[0] if len(self.laws) == 1 else torch.cat(self.laws)
        return Proposal(self.token_ids, self.counts, self.source, laws, self.entropy, self.counts)


def joined(top: Proposal, tail: Proposal) -> Proposal:
    """The top level's tokens with the tail behind them, each with its own law."""
    counts = top.counts + tail.counts
    token_ids = np.zeros((len(counts), int(counts.max(initial=0))), dtype=np.int64)
    source, entropy = np.zeros_like(token_ids), np.full(token_ids.shape, np.nan)
    laws, moved = top.laws, 0
    if laws is not None:
        tail, moved = tail.with_laws(laws), len(laws)
        laws = torch.cat([laws, tail.laws])
    for part, at, shift in ((top, np.zeros_like(counts), 0), (tail, top.counts, moved)):
        owners, offsets = ragged_arange(part.counts)
        place = (owners, at[owners] + offsets)
        token_ids[place] = part.token_ids[owners, offsets]
        source[place] = shift + part.source[owners, offsets]
    top_owners, top_offsets = ragged_arange(top.counts)
    entropy[top_owners, top_offsets] = top.entropy[top_owners, top_offsets]
    return Proposal(token_ids, counts, source, laws, entropy, top.counts)


def ragged_arange(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts [2, 0, 3]: owners [0, 0, 2, 2, 2] and offsets [0, 1, 0, 1, 2]."""
    owners = np.repeat(np.arange(len(counts)), counts)
    offsets = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owners, offsets


def _filled(counts: np.ndarray, width: int) -> np.ndarray:
    return np.arange(width) < counts[:, None]
