"""Rows of a step in which requests have several drafts: where their tokens and blocks are.

vLLM schedules one flat list of draft tokens for a request: [x.., y.., z..], a chain x and what
branches y, z have of their own. With the last verified token, the root, in front, the chain is a
row of the attention. A branch begins like another row, at least with the root; its own tokens are
a row that goes on from there.

A branch's row has the blocks of the request but for those from the root on. In their place it has
private ones, which lie in the same request's table, behind all that its other levels may write. The
keys and values of the tokens that it shares are written there, too, when their own row's are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_hsd.cascade import row_layout
from vllm_hsd.cascade.branch_store import BranchStore
from vllm_hsd.cascade.drafts import ragged_arange, ragged_starts


class Rows(NamedTuple):
    """The rows of B requests, at most R of each, in the order of the flat batch.

    Attributes:
        places: [B, R, L + 1] int64, place among its request's tokens of a row's root and of its
            draft tokens, shared or its own. Those from counts[b, r] on mean nothing.
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

    def before(self, request: int) -> list[list[int]]:
        """Places of the draft tokens that precede each token of a request, the root among them."""
        counts, places = self.counts[request].tolist(), self.places[request].tolist()
        if not any(counts[1:]):
            return [list(range(1, n + 1)) for n in range(counts[0])]
        found: dict[int, list[int]] = {}
        for count, path in zip(counts, places, strict=True):
            for depth in range(count):
                found.setdefault(path[depth], path[1 : depth + 1])
        return [found[place] for place in range(len(found))]


def lay_out(
    scheduled: np.ndarray,
    base: np.ndarray,
    chain: np.ndarray,
    store: BranchStore,
    slots: np.ndarray,
) -> Rows:
    """The rows of a batch, as far as the scheduler did not cut them.

    Args:
        scheduled: [B] int64 tokens of each request.
        base: [B] int64, position of each request's first token.
        chain: [B] int64, tokens of the chain as it was drafted.
        store: the branches as they were drafted.
        slots: [B] int64, of the requests.
    """
    drafted, shared, parent = store.counts[slots], store.shared[slots], store.parent[slots]
    widths = np.concatenate([chain[:, None] + 1, drafted - shared], axis=1)
    # A part of a prompt, placeholders, or a chain alone.
    single = ~drafted.any(1)
    widths[single, 0] = scheduled[single]
    offsets = np.cumsum(widths, axis=1) - widths
    own = np.clip(scheduled[:, None] - offsets, 0, widths)
    if (own.sum(1) != scheduled).any():
        raise AssertionError(f"{scheduled} tokens are scheduled where {widths} were drafted")
    counts = own.copy()
    counts[:, 1:] += np.where(own[:, 1:] > 0, 1 + shared, 0)
    depth = np.arange(store.token_ids.shape[2] + 1)
    places = np.tile(depth, (*own.shape, 1))
    batch = np.arange(len(slots))
    for r in range(1, own.shape[1]):
        more = depth - shared[:, r - 1, None] - 1
        of_parent = places[batch, parent[:, r - 1]]
        places[:, r] = np.where(more < 0, of_parent, offsets[:, r, None] + more)
    request, branch = np.nonzero(own)
    tokens, root = own[request, branch], base[request]
    begin = root + counts[request, branch] - tokens
    return Rows(places, counts, request, branch, ragged_starts(tokens), tokens, root, begin)


def flat_tokens(
    chain: list[int], branches: list[list[int]], counts: list[int], shared: list[int]
) -> list[int]:
    """The list that is scheduled for one request: its chain, then the branches' own tokens."""
    flat = list(chain)
    for branch, count, known in zip(branches, counts, shared, strict=True):
        flat += branch[known:count]
    return flat


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
        """Of tokens that branches share: places in the flat batch, branches' slots; [k] int64."""
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
