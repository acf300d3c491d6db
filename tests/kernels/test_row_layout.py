"""Rows of chains and branches on the device: what every token sees, before and after a branch won.

Kernels lay the rows out and copy blocks; the caches hold, for each token, a number that tells it.
"""

from math import prod

import numpy as np
import pytest
import torch

from vllm_hsd.cascade.row_layout import PrivateBlocks
from vllm_hsd.kernels import branch_kernels
from vllm_hsd.kernels.blocks import padded_size
from vllm_hsd.kernels.copy_blocks import (
    BranchRows,
    CacheBlocks,
    copy_from_winners,
    copy_to_branches,
)

BRANCHES, GUARD, AROUND = 2, -77, 64
HEADS, SIZE = 2, 4


class Caches:
    """Three layers [blocks, tokens of a block, ...] of different layouts, in guarded memory."""

    def __init__(self, blocks: int, size: int) -> None:
        self.size = size
        shapes = [
            ((blocks, 2, size, HEADS, SIZE), (0, 2, 1, 3, 4)),
            ((2, blocks, size, HEADS, SIZE), (1, 2, 0, 3, 4)),
            ((blocks, HEADS, size, 2 * SIZE), (0, 2, 1, 3)),
        ]
        self.layers, self.around = [], []
        for shape, order in shapes:
            whole = torch.full((prod(shape) + 2 * AROUND,), float(GUARD))
            self.around += [whole[:AROUND], whole[-AROUND:]]
            self.layers.append(whole[AROUND:-AROUND].view(shape).permute(order))

    def write(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        at = torch.from_numpy(slots)
        for layer in self.layers:
            given = torch.from_numpy(tokens).float().view(-1, *[1] * (layer.ndim - 2))
            layer[at // self.size, at % self.size] = given

    def read(self, slots: np.ndarray) -> list[int]:
        at = torch.from_numpy(slots)
        found = [layer[at // self.size, at % self.size].flatten(1) for layer in self.layers]
        tokens = found[0][:, :1]
        assert all((each == tokens).all() for each in found)
        return tokens[:, 0].int().tolist()


def text(request: int, count: int) -> np.ndarray:
    """[count] the tokens before the root of a request."""
    return 4096 * request + np.arange(count)


def row_of(request: int, branch: int, count: int) -> np.ndarray:
    """[count] the tokens of a row from the root on, which all rows of a request share."""
    tokens = 4096 * request + 1024 * (branch + 1) + np.arange(count)
    tokens[:1] = 4096 * request + 1024
    return tokens


def ints(values: np.ndarray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def guarded(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, GUARD, dtype=dtype)


def room(group: PrivateBlocks, base: np.ndarray) -> np.ndarray:
    """Tokens that a branch has blocks for after its root at position `base`."""
    return group.per_row * group.block_size - 1 - base % group.block_size


class Batch:
    """Requests with roots at every place of a block: whole lists and cut ones, and no proposal."""

    def __init__(self, size: int, length: int) -> None:
        self.size, self.length, width = size, length, length + 1
        rng = np.random.default_rng(size + length)
        self.group = group = PrivateBlocks(size, length)
        # More than once at the last one.
        offset = np.append(np.arange(0, max(size, 12), max(size // 32, 1)), [size - 1] * 6)
        self.base = base = rng.integers(2, 4, len(offset)) * size + offset % size
        self.count = batch = len(base)
        counts = rng.integers(0, width, (batch, BRANCHES)) * (rng.random((batch, BRANCHES)) < 0.7)
        counts = np.minimum(counts, room(group, base)[:, None])
        counts[0] = 0
        scheduled = np.full(batch, (BRANCHES + 1) * width)
        scheduled[2:5] = 2 * width + 2, width + 3, 2
        # Places in a proposal, which one request is not in.
        self.number = rng.permutation(batch)
        self.number[5] = -1
        self.drafted = np.zeros((batch, BRANCHES), np.int64)
        self.drafted[self.number[self.number >= 0]] = counts[self.number >= 0]
        counts[self.number < 0] = 0
        rows = -(-scheduled // width)
        self.request, self.branch = np.array(
            [(i, r) for i in range(batch) for r in range(rows[i])]
        ).T
        first = np.cumsum(scheduled) - scheduled
        self.start = first[self.request] + self.branch * width
        self.tokens = np.minimum(scheduled[self.request] - self.branch * width, width)
        self.position = np.repeat(base, scheduled) + np.concatenate([*map(np.arange, scheduled)])
        # Inputs of each row that mean something.
        cut = np.clip(scheduled[:, None] - [width, 2 * width], 0, width)
        held = np.where(counts > 0, np.minimum(counts + 1, cut), 0)
        self.held = np.concatenate([np.minimum(scheduled, width)[:, None], held], 1)
        # What the scheduler reserves where one token is computed; after it one block for all.
        blocks = -(-(base + 1 + group.lookahead(BRANCHES + 1)) // size)
        self.spare, self.main = int(blocks.sum()), np.full((batch, blocks.max()), blocks.sum())
        self.main[np.arange(blocks.max()) < blocks[:, None]] = rng.permutation(self.spare)

    def lay_out(self) -> dict[str, torch.Tensor]:
        n, columns = len(self.request), self.main.shape[1]
        found = {
            "position": ints(self.position, torch.int64),
            "slots": guarded(len(self.position) + 1, dtype=torch.int64),
            "table": guarded(n + 1, columns),
            "seq_len": guarded(n + 1),
            "chain": guarded(n + 1),
            "base": guarded(n + 1, dtype=torch.int64),
            "count": torch.zeros(self.count, BRANCHES + 1, dtype=torch.int32),
        }
        branch_kernels.lay_out_kernel[(n,)](
            *(found[name] for name in ("position", "slots", "table")),
            columns,
            *(found[name] for name in ("seq_len", "chain", "base", "count")),
            *map(ints, (self.request, self.branch, self.start, self.tokens)),
            # Request i is in slot B - 1 - i.
            ints(np.arange(self.count)[::-1], torch.int64),
            ints(self.number[::-1]),
            ints(self.drafted),
            ints(self.main),
            columns,
            self.size,
            self.length,
            FIRST=True,
            BRANCHES=BRANCHES,
            LANES=padded_size(self.length + 1),
            BLOCK=8,
        )
        assert all((found[k][n:] == GUARD).all() for k in ("table", "seq_len", "chain", "base"))
        assert found["slots"][-1] == GUARD
        return found

    def slots(self, table: np.ndarray, count: int) -> np.ndarray:
        """[count] places in the cache of the first positions of a row."""
        position = np.arange(count)
        return table[position // self.size].astype(np.int64) * self.size + position % self.size


@pytest.mark.parametrize(
    ("size", "length"),
    [
        *(pytest.param(*case, marks=pytest.mark.every_kernel) for case in ((4, 5), (16, 8))),
        *((4, 3), (16, 24), (32, 3), (64, 5), (128, 8)),
    ],
)
def test_every_row_computes_what_it_would_alone(size, length):
    """Every token sees its own row's text and no other's, and so does what follows the winner."""
    batch = Batch(size, length)
    found = batch.lay_out()
    n, held = len(batch.request), batch.held[batch.request, batch.branch]
    chain = np.arange(n) - batch.branch
    assert found["count"].tolist() == batch.held.tolist()
    assert found["chain"][:n].tolist() == np.where(held > 0, chain, -1).tolist()
    assert (found["base"][:n].numpy() == batch.base[batch.request]).all()
    assert (found["seq_len"][:n].numpy() == batch.base[batch.request] + batch.tokens).all()
    caches, tables = Caches(batch.spare + 1, size), found["table"].numpy()
    for i, base in enumerate(batch.base):
        caches.write(batch.slots(batch.main[i], base), text(i, base))
        # What a drafter has computed of the root.
        caches.write(batch.slots(batch.main[i], base + 1)[base:], np.array([i]))
    cache = CacheBlocks.of(caches.layers)
    # Of the second layout keys and values lie apart.
    assert len(cache.pieces) == 4
    places = found["chain"][:n], found["base"][:n]
    rows = BranchRows(ints(batch.request), ints(batch.branch), *places)
    copy_to_branches(cache, rows, found["table"], size)
    expected = []
    for row, (i, branch) in enumerate(zip(batch.request, batch.branch, strict=True)):
        base, at = batch.base[i], slice(batch.start[row], batch.start[row] + batch.tokens[row])
        assert found["position"][at].tolist() == list(range(base, base + batch.tokens[row]))
        own, slots = row_of(i, branch, held[row]), found["slots"][at].numpy()
        if held[row]:
            assert caches.read(batch.slots(tables[row], base + 1)[base:]) == [i]
        if branch:
            assert (slots[held[row] :] == -1).all()
        else:
            assert (slots == GUARD).all()
            slots = batch.slots(batch.main[i], base + held[row])[base:]
        caches.write(slots[: held[row]], own)
        expected.append([*text(i, base), *own] if held[row] else [])
    for row, tokens in enumerate(expected):
        assert caches.read(batch.slots(tables[row], len(tokens))) == tokens
    check_winners(batch, caches, cache, rows, found["table"], expected)
    assert all((values == GUARD).all() for values in caches.around)
    assert all((layer[batch.spare] == GUARD).all() for layer in caches.layers)


def check_winners(batch: Batch, caches, cache, rows, tables, expected) -> None:
    """Of every request the main blocks hold the text of any row that has won, as far as it is kept.

    Whole blocks up to the root are not written: other requests may share them.
    """
    rng = np.random.default_rng(batch.size)
    chains = np.flatnonzero(batch.branch == 0)
    winner, kept = np.zeros((2, batch.count), np.int64)
    for i, held in enumerate(batch.held):
        winner[i] = rng.choice(np.flatnonzero(held)[-2:])
        kept[i] = rng.integers(0, held[winner[i]])
    won = (winner > 0) & (kept > 0)
    # In large blocks no branch begins at the last place.
    ends_block = (batch.base + 1) % batch.size == 0
    assert won.sum() > 1 and (won & ends_block).any() == (batch.group.per_row > 1)
    whole = (batch.base + 1) // batch.size * batch.size
    shared = [batch.slots(own, count) for own, count in zip(batch.main, whole, strict=True)]
    for slots in shared:
        caches.write(slots, np.full(len(slots), GUARD))
    copy_from_winners(cache, rows, tables, batch.size, ints(winner), ints(kept + 1), batch.length)
    assert all(set(caches.read(slots)) == {GUARD} for slots in shared)
    for i, (first, end) in enumerate(zip(whole, batch.base + kept + 1, strict=True)):
        tokens = expected[chains[i] + winner[i]][first:end]
        assert caches.read(batch.slots(batch.main[i], end)[first:]) == tokens


def test_private_blocks_of_small_blocks_never_cut_a_branch():
    for size, length in ((16, 8), (16, 24), (32, 8), (4, 3)):
        assert room(PrivateBlocks(size, length), np.arange(size)).min() >= length
    large = PrivateBlocks(128, 8)
    assert (room(large, np.arange(128)) >= 8).mean() > 0.9 and large.lookahead(4) == 8 + 3 * 128


def test_pieces_of_odd_sizes_are_refused():
    with pytest.raises(ValueError, match="16 bytes"):
        CacheBlocks.of([torch.zeros(4, 3)])
