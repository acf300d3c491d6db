"""Rows of a step in which requests have several drafts, in plain numpy: where their blocks are.

vLLM schedules one list of draft tokens for a request. With the last verified token, the root, in
front it is the chain, and then the root again and the tokens of each branch. A branch's row has the
blocks of the request but for those from the root on, in whose place it has private ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_hsd.cascade import row_layout


class Rows(NamedTuple):
    """The rows of a batch in its order, [n] int64 each."""

    request: np.ndarray
    branch: np.ndarray  # its number in the request; 0 is the chain
    chain: np.ndarray  # the row of its request's chain
    base: np.ndarray  # position of its root
    held: np.ndarray  # inputs from the root on that mean something; 0: no blocks of its own

    @property
    def branches(self) -> np.ndarray:
        """[m] int64 numbers of the rows that are branches with blocks of their own."""
        return np.flatnonzero((self.branch > 0) & (self.held > 0))


def whole_rows(base: np.ndarray, chain: np.ndarray, branches: np.ndarray) -> Rows:
    """All rows of requests with roots at [B] base and tokens of [B] chains, [B, R - 1] branches."""
    size, most = len(base), branches.shape[1] + 1
    held = np.concatenate([chain[:, None] + 1, np.where(branches > 0, branches + 1, 0)], axis=1)
    request, branch = np.divmod(np.arange(size * most), most)
    return Rows(request, branch, request * most, base[request], held.ravel())


class PrivateBlocks(row_layout.PrivateBlocks):
    """The blocks' places row by row, as the kernels compute them."""

    def room(self, base: np.ndarray) -> np.ndarray:
        """Draft tokens that a branch has room for after its root at position `base`."""
        return self.per_row * self.block_size - 1 - base % self.block_size

    def tables(self, rows: Rows, main: np.ndarray) -> np.ndarray:
        """[n, width] block ids of every row, from those of every request, [B, width]."""
        tables: np.ndarray = main[rows.request]
        for row in rows.branches:
            begin, end = rows.base[row], rows.base[row] + rows.held[row]
            index = np.arange(begin // self.block_size, (end - 1) // self.block_size + 1)
            private = self.first(begin, rows.branch[row]) + index - index[0]
            tables[row, index] = main[rows.request[row], private]
        return tables

    def slots(self, rows: Rows, tables: np.ndarray, row: int) -> np.ndarray:
        """[held] int64 places in the cache of what a row computes from its root on."""
        position = rows.base[row] + np.arange(rows.held[row])
        block = tables[row, position // self.block_size]
        slots: np.ndarray = block * self.block_size + position % self.block_size
        return slots

    def copied_before(self, rows: Rows, tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Blocks [k] that hold text before a root, and blocks [k] of branches to copy them to."""
        some = rows.branches[rows.base[rows.branches] % self.block_size > 0]
        block = rows.base[some] // self.block_size
        return tables[rows.chain[some], block], tables[some, block]

    def copied_after(
        self, rows: Rows, tables: np.ndarray, winners: np.ndarray, kept: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Blocks [k] of winning branches with text after the root, and blocks [k] of the requests.

        The first one holds the position after the root: a root that ends a block has been computed
        there by the chain, and other requests may share that block already. `kept` draft tokens of
        each winner are part of the text now, at least one.
        """
        found = []
        for row, base, count in zip(winners, rows.base[winners], kept, strict=True):
            last = (base + count) // self.block_size
            found += [(row, block) for block in range((base + 1) // self.block_size, last + 1)]
        row, block = np.array(found).T
        return tables[row, block], tables[rows.chain[row], block]
