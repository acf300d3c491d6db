"""Copies of blocks between chains and branches against the plain layout, in guarded memory."""

import numpy as np
import pytest
import torch
from support.row_layout import PrivateBlocks, Rows, whole_rows

from vllm_hsd.kernels.copy_blocks import (
    BranchRows,
    CacheBlocks,
    copy_from_winners,
    copy_to_branches,
)

LENGTH, HEADS, SIZE = 6, 2, 4


def layers(blocks: int, block_size: int):
    """(caches [blocks, ...] of three layouts, the whole memory around each of them)."""
    shapes = [
        ((blocks, 2, block_size, HEADS, SIZE), (0, 1, 2, 3, 4)),
        ((2, blocks, block_size, HEADS, SIZE), (1, 0, 2, 3, 4)),
        ((blocks, HEADS, block_size, 2 * SIZE), (0, 2, 1, 3)),
    ]
    caches, memory, guard = [], [], 64
    for i, (shape, order) in enumerate(shapes):
        count = int(np.prod(shape))
        whole = torch.arange(count + 2 * guard, dtype=torch.float32) + 1e5 * i
        memory.append(whole)
        caches.append(whole[guard : guard + count].view(shape).permute(order))
    return caches, memory


def batch(block_size: int, seed: int):
    """Rows of requests whose roots lie at every place of a block, and tables of distinct blocks."""
    rng = np.random.default_rng(seed)
    size = max(block_size, 20) + 2
    base = rng.integers(1, 4, size) * block_size + np.arange(size) % block_size
    chain = rng.integers(1, LENGTH + 1, size)
    branches = rng.integers(0, LENGTH + 1, (size, 2))
    branches[0] = 0
    group = PrivateBlocks(block_size, LENGTH)
    counts = np.minimum(branches, group.room(base)[:, None])
    rows = whole_rows(base, chain, counts)
    width = int(group.first(base.max(), 3)) + 1
    main = rng.permutation(size * width).reshape(size, width).astype(np.int32)
    return group, rows, group.tables(rows, main), size * width, rng


def on_device(rows: Rows) -> BranchRows:
    each = rows.request, rows.branch, np.where(rows.held > 0, rows.chain, -1)
    small = (torch.from_numpy(values.astype(np.int32)) for values in each)
    return BranchRows(*small, torch.from_numpy(rows.base))


def copied(caches, sources, targets):
    for cache in caches:
        cache[torch.from_numpy(targets).long()] = cache[torch.from_numpy(sources).long()].clone()


@pytest.mark.every_kernel
@pytest.mark.parametrize("block_size", [4, 16])
def test_copies_are_those_of_the_layout(block_size):
    group, rows, tables, blocks, rng = batch(block_size, seed=block_size)
    caches, memory = layers(blocks, block_size)
    expected, expected_memory = layers(blocks, block_size)
    cache, device = CacheBlocks.of(caches), on_device(rows)
    # Of the second layout keys and values lie apart.
    assert len(cache.pieces) == 4
    ids = torch.from_numpy(tables).int()
    copied(expected, *group.copied_before(rows, tables))
    copy_to_branches(cache, device, ids, block_size)
    assert all(map(torch.equal, memory, expected_memory))

    chains = np.flatnonzero(rows.branch == 0)
    row = chains + rng.integers(0, 3, len(chains))
    row = np.where(rows.held[row] > 1, row, chains)
    winner = row - chains
    kept = np.minimum(rng.integers(0, LENGTH + 1, len(row)), rows.held[row] - 1)
    won = (winner > 0) & (kept > 0)
    assert won.sum() > 1
    sources, targets = group.copied_after(rows, tables, row[won], kept[won])
    assert block_size > LENGTH or len(sources) > won.sum()
    for whole in (memory, expected_memory):
        for values in whole:
            values.copy_(torch.arange(len(values)) * 3.0)
    copied(expected, sources, targets)
    results = (torch.from_numpy(values).int() for values in (winner, kept + 1))
    copy_from_winners(cache, device, ids, block_size, *results, LENGTH)
    assert all(map(torch.equal, memory, expected_memory))


def test_rows_without_blocks_of_their_own_are_left_alone():
    _, rows, tables, blocks, _ = batch(4, seed=0)
    caches, memory = layers(blocks, 4)
    before = [values.clone() for values in memory]
    device = on_device(rows)
    device = device._replace(chain=torch.where(device.branch > 0, -1, device.chain).int())
    copy_to_branches(CacheBlocks.of(caches), device, torch.from_numpy(tables).int(), 4)
    assert all(map(torch.equal, memory, before))


def test_pieces_of_odd_sizes_are_refused():
    with pytest.raises(ValueError, match="16 bytes"):
        CacheBlocks.of([torch.zeros(4, 3)])
