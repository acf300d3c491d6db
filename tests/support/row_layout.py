"""Rows of a step in which requests have several drafts: where their tokens and blocks are.

vLLM schedules one flat list of draft tokens for a request: [x.., y.., z..], a chain x and what
branches y, z have of their own. With the last verified token, the root, in front, the chain is a
row of the attention. A branch begins with the root, too; its own tokens are a row that goes on from
there.

A branch's row has the blocks of the request but for those from the root on. In their place it has
private ones, which lie in the same request's table, behind all that its other levels may write. The
keys and values of the root are written there, too, when the chain's are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_hsd.cascade import row_layout
from vllm_hsd.cascade.ragged import ragged_arange, ragged_starts


class Rows(NamedTuple):
    """The rows of B requests, at most R of each, in the order of the flat batch.

    Attributes:
        places: [B, R, L + 1] int64, place among its request's tokens of a row's root and of its
            draft tokens. Those from counts[b, r] on mean nothing.
        counts: [B, R] int64 tokens of a row with its root; 0: no row. The first row of a request
            is its chain, or whatever it computes where it has no branches.
        request, branch, start, tokens, base, begin: [n] int64, of each row: its request, its place
            there, its first own token in the flat batch, its own tokens, and the positions in the
            text of its root and of its first own token (the root, for a chain).
    """

    places: np.ndarray
    counts: np.ndarray
    request: np.ndarray
    branch: np.ndarray
    start: np.ndarray
    tokens: np.ndarray
    base: np.ndarray
    begin: np.ndarray

    @property
    def branches(self) -> np.ndarray:
        """[m] int64 numbers of the rows that are branches."""
        return np.flatnonzero(self.branch)

    def number(self, requests: np.ndarray, branch: np.ndarray) -> np.ndarray:
        """[k] int64 numbers of rows that are there."""
        numbers = np.cumsum(self.counts.ravel() > 0) - 1
        found: np.ndarray = numbers.reshape(self.counts.shape)[requests, branch]
        return found


def lay_out(
    scheduled: np.ndarray, base: np.ndarray, chain: np.ndarray, drafted: np.ndarray
) -> Rows:
    """The rows of a batch, as far as the scheduler did not cut them.

    Args:
        scheduled: [B] int64 tokens of each request.
        base: [B] int64, position of each request's first token.
        chain: [B] int64, tokens of the chain as it was drafted.
        drafted: [B, R - 1] int64, tokens of the branches as they were drafted.
    """
    widths = np.concatenate([chain[:, None] + 1, drafted], axis=1)
    # A part of a prompt, placeholders, or a chain alone.
    single = ~drafted.any(1)
    widths[single, 0] = scheduled[single]
    offsets = np.cumsum(widths, axis=1) - widths
    own = np.clip(scheduled[:, None] - offsets, 0, widths)
    if (own.sum(1) != scheduled).any():
        raise AssertionError(f"{scheduled} tokens are scheduled where {widths} were drafted")
    counts = own.copy()
    counts[:, 1:] += own[:, 1:] > 0
    depth = np.arange(max(chain.max(), drafted.max()) + 1)
    places = np.tile(depth, (*own.shape, 1))
    places[:, 1:, 1:] = offsets[:, 1:, None] + depth[1:] - 1
    request, branch = np.nonzero(own)
    tokens, root = own[request, branch], base[request]
    begin = root + counts[request, branch] - tokens
    return Rows(places, counts, request, branch, ragged_starts(tokens), tokens, root, begin)


class PrivateBlocks(row_layout.PrivateBlocks):
    """The blocks' places row by row, as the kernels compute them."""

    def tables(self, rows: Rows, main: np.ndarray) -> np.ndarray:
        """[n, width] block ids of every row, from those of every request, [B, width]."""
        tables: np.ndarray = main[rows.request]
        some = rows.branches
        begin = rows.base[some] // self.block_size
        last = (rows.begin + rows.tokens - 1)[some] // self.block_size
        owners, offsets = ragged_arange(last - begin + 1)
        private = self.first(rows.base[some], rows.branch[some])[owners] + offsets
        tables[some[owners], begin[owners] + offsets] = main[rows.request[some][owners], private]
        return tables

    def slots(self, rows: Rows, tables: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of branches' own tokens: places in the flat batch, positions, slots; [tokens] int64."""
        some = rows.branches
        owners, offsets = ragged_arange(rows.tokens[some])
        owners = some[owners]
        positions = rows.begin[owners] + offsets
        return rows.start[owners] + offsets, positions, self._slots(tables, owners, positions)

    def repeated(self, rows: Rows, tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of roots that branches share: places in the flat batch, branches' slots; [k] int64."""
        some = rows.branches
        owners, depth = ragged_arange((rows.begin - rows.base)[some])
        owners = some[owners]
        request = rows.request[owners]
        first = rows.start[rows.number(request, np.zeros_like(request))]
        places = first + rows.places[request, rows.branch[owners], depth]
        return places, self._slots(tables, owners, rows.base[owners] + depth)

    def _slots(self, tables: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        blocks = tables[rows, positions // self.block_size].astype(np.int64)
        slots: np.ndarray = blocks * self.block_size + positions % self.block_size
        return slots

    def copied_before(self, rows: Rows, tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Blocks [k] that hold text before a root, and blocks [k] of branches to copy them to."""
        some = rows.branches[rows.base[rows.branches] % self.block_size > 0]
        block = rows.base[some] // self.block_size
        return self._chain_tables(rows, tables, some, block), tables[some, block]

    def copied_after(
        self, rows: Rows, tables: np.ndarray, winners: np.ndarray, kept: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Blocks [k] of winning branches with text after the root, and blocks [k] of the requests.

        The first one holds the position after the root: a root that ends a block has been computed
        there by the chain, and other requests may share that block already.

        Args:
            rows: of the batch.
            tables: of the rows.
            winners: [w] int64 numbers of rows.
            kept: [w] int64 draft tokens of each that are part of the text now, at least one.
        """
        first = (rows.base[winners] + 1) // self.block_size
        last = (rows.base[winners] + kept) // self.block_size
        owners, offsets = ragged_arange(last - first + 1)
        block, row = first[owners] + offsets, winners[owners]
        return tables[row, block], self._chain_tables(rows, tables, row, block)

    def _chain_tables(
        self, rows: Rows, tables: np.ndarray, some: np.ndarray, block: np.ndarray
    ) -> np.ndarray:
        chains = np.flatnonzero(rows.branch == 0)
        found: np.ndarray = tables[chains[rows.request[some]], block]
        return found
