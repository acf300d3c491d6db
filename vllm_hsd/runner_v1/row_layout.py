"""Rows of a step in which requests have several drafts: where their tokens and blocks are.

vLLM schedules one flat list of draft tokens for a request: [x.., root, y.., root, z..], a chain x
and branches y, z. With the root in front, its last verified token, these are rows that share the
text before the root. The root is repeated because vLLM writes the keys and values of a token to one
slot, and a row reads those of its root from a block of its own.

A branch's row has the blocks of the request but for those from the root on. In their place it has
private ones, which lie in the same request's table, behind all that its other levels may write.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_hsd.core.drafts import ragged_arange, ragged_starts


class Rows(NamedTuple):
    """The rows of B requests, at most R of each, in the order of the flat batch.

    Attributes:
        offsets: [B, R] int64, place of a row's root among its request's tokens.
        counts: [B, R] int64 tokens of a row with its root; 0: no row. The first row of a request
            is its chain, or whatever it computes where it has no branches.
        request, branch, start, tokens, base: [n] int64, of each row: its request, its place there,
            its first token in the flat batch, its tokens, and its first position in the text.
    """

    offsets: np.ndarray
    counts: np.ndarray
    request: np.ndarray
    branch: np.ndarray
    start: np.ndarray
    tokens: np.ndarray
    base: np.ndarray

    @property
    def begins(self) -> np.ndarray:
        """[tokens] int64, place of the root of each token's row among its request's tokens."""
        return np.repeat(self.offsets[self.request, self.branch], self.tokens)

    @property
    def branches(self) -> np.ndarray:
        """[m] int64 numbers of the rows that are branches."""
        return np.flatnonzero(self.branch)

    def number(self, requests: np.ndarray, branch: np.ndarray) -> np.ndarray:
        """[k] int64 numbers of rows that are there."""
        numbers = np.cumsum(self.counts.ravel() > 0) - 1
        return numbers.reshape(self.counts.shape)[requests, branch]


def lay_out(
    scheduled: np.ndarray, base: np.ndarray, chain: np.ndarray, branches: np.ndarray
) -> Rows:
    """The rows of a batch, as far as the scheduler did not cut them.

    Args:
        scheduled: [B] int64 tokens of each request.
        base: [B] int64, position of each request's first token.
        chain: [B] int64, tokens of the chain as it was drafted.
        branches: [B, R - 1] int64, tokens of each branch as it was drafted; 0 for none.
    """
    widths = np.concatenate([chain[:, None] + 1, branches + (branches > 0)], axis=1)
    # A part of a prompt, placeholders, or a chain alone.
    single = ~branches.any(1)
    widths[single, 0] = scheduled[single]
    offsets = np.cumsum(widths, axis=1) - widths
    counts = np.clip(scheduled[:, None] - offsets, 0, widths)
    if (counts.sum(1) != scheduled).any():
        raise AssertionError(f"{scheduled} tokens are scheduled where {widths} were drafted")
    request, branch = np.nonzero(counts)
    count = counts[request, branch]
    return Rows(offsets, counts, request, branch, ragged_starts(count), count, base[request])


def flat_tokens(
    root: int, chain: list[int], branches: list[list[int]], counts: list[int]
) -> list[int]:
    """The list that is scheduled for one request: its chain, then root and tokens of branches."""
    flat = list(chain)
    for branch, count in zip(branches, counts, strict=True):
        if count:
            flat += [root, *branch[:count]]
    return flat


class PrivateBlocks(NamedTuple):
    """Where branches have their blocks in a KV-cache group.

    Attributes:
        block_size: tokens of a block.
        length: longest draft.
    """

    block_size: int
    length: int

    @property
    def per_row(self) -> int:
        """Blocks of a branch.

        All that it can touch where blocks are small. Among large ones few drafts cross a boundary:
        a branch ends there, and does without the block behind it.
        """
        return -(-self.length // self.block_size) + (self.block_size < 8 * self.length)

    def lookahead(self, rows: int) -> int:
        """Tokens to reserve past those that the target computes, for `rows` drafts."""
        return self.length + (rows - 1) * self.per_row * self.block_size

    def first(self, base: np.ndarray, branch: np.ndarray | int) -> np.ndarray:
        """Index in its request's table of the first private block of a branch, from 1 on.

        It needs nothing but the root's position `base`, so drafting and computing agree on it.
        """
        return (base + self.length) // self.block_size + 1 + (branch - 1) * self.per_row

    def room(self, base: np.ndarray) -> np.ndarray:
        """Draft tokens that a branch has room for after its root at position `base`."""
        return self.per_row * self.block_size - 1 - base % self.block_size

    def tables(self, rows: Rows, main: np.ndarray) -> np.ndarray:
        """[n, width] block ids of every row, from those of every request, [B, width]."""
        tables, some = main[rows.request], rows.branches
        begin = rows.base[some] // self.block_size
        last = (rows.base + rows.tokens - 1)[some] // self.block_size
        owners, offsets = ragged_arange(last - begin + 1)
        private = self.first(rows.base[some], rows.branch[some])[owners] + offsets
        tables[some[owners], begin[owners] + offsets] = main[rows.request[some][owners], private]
        return tables

    def slots(self, rows: Rows, tables: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of all tokens of branches: places in the flat batch, positions, slots; [tokens] int64."""
        some = rows.branches
        owners, offsets = ragged_arange(rows.tokens[some])
        owners = some[owners]
        positions = rows.base[owners] + offsets
        blocks = tables[owners, positions // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + positions % self.block_size
        return rows.start[owners] + offsets, positions, slots

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
        return tables[chains[rows.request[some]], block]
