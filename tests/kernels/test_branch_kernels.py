"""Which offers become branches, and the list that is scheduled of them."""

from functools import partial

import numpy as np
import pytest
import torch

from vllm_hsd.cascade.row_layout import PrivateBlocks
from vllm_hsd.kernels import branch_kernels
from vllm_hsd.kernels.blocks import padded_size

N, BRANCHES, WINDOW = 5, 2, 3
GUARD = -77
ints = partial(torch.tensor, dtype=torch.int32)


def guarded(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, GUARD, dtype=dtype)


@pytest.mark.every_kernel
def test_the_next_best_offers_with_other_first_tokens_become_branches():
    rng = np.random.default_rng(0)
    batch, sources, slots = 12, 4, 12
    counts = rng.integers(0, N + 1, (sources, slots + 1))
    token_ids = rng.integers(0, 3, (sources, slots + 1, N))
    # Multiples of 1/4: sums are exact.
    expected = rng.integers(1, 5, (sources, slots + 1, N)) / 4
    room = rng.integers(1, N + 1, batch)
    requested = room.copy()
    requested[-1] = 0
    window, drafted = rng.integers(0, 3, (batch, WINDOW + N)), rng.integers(0, 3, batch)
    slot = rng.permutation(batch)
    own = torch.zeros(2, sources, slots + 1, dtype=torch.float64)
    window_, *each = map(ints, (window, WINDOW + drafted, drafted, room, requested, slot))
    found = guarded(batch + 1, BRANCHES, N), guarded(batch + 1, BRANCHES)
    numbers = torch.tensor([4.0, 0.3], dtype=torch.float64)
    counts[:, slots] = 0
    branch_kernels.choose_branches_kernel[(batch,)](
        *found,
        window_,
        window_.stride(0),
        *each,
        own,
        ints(counts),
        ints(token_ids),
        torch.from_numpy(expected),
        numbers[:1],
        numbers[1:],
        slots,
        SOURCES=sources,
        BRANCHES=BRANCHES,
        FIRSTS=padded_size(BRANCHES + 1),
        N=N,
        LANES=padded_size(N),
    )
    lengths = set()
    for b in range(batch):
        at = slot[b] if requested[b] else slots
        offers = []
        for s in range(sources):
            survival = np.cumprod(expected[s, at, : min(counts[s, at], room[b])])
            kept = survival[survival >= 0.3]
            offers.append((kept.sum(), s, token_ids[s, at, : len(kept)].tolist()))
        rows, firsts = [], {window[b, WINDOW] if drafted[b] else None}
        for *_, row in sorted(offers, reverse=True):
            if row and row[0] not in firsts:
                rows.append(row)
                firsts.add(row[0])
        for j, row in enumerate([*rows, [], []][:BRANCHES]):
            assert found[1][b, j] == len(row)
            assert found[0][b, j, : len(row)].tolist() == row
            lengths.add(len(row))
    assert len(lengths) > 3
    assert all((values[batch] == GUARD).all() for values in found)


@pytest.mark.every_kernel
@pytest.mark.parametrize("sizes", [(4,), (16, 64)])
def test_a_flat_list_has_a_root_before_every_branch_within_its_blocks(sizes):
    rng = np.random.default_rng(len(sizes))
    batch, longest = 10, 400
    width = (BRANCHES + 1) * (N + 1) - 1
    base = rng.integers(0, longest - WINDOW - 1, batch)
    base[:4] = longest - WINDOW - 1, 3, 128 + 61 - WINDOW + 1, longest - 20
    tokens, counts = rng.integers(1, 9, (batch, BRANCHES, N)), rng.integers(0, N + 1, (batch, 2))
    chain, window = rng.integers(1, 9, (batch, N)), rng.integers(10, 19, (batch, WINDOW + N))
    chained = np.arange(batch) % 5 == 4
    out = guarded(batch + 1, width + 2, dtype=torch.int64)
    counts_, window_ = ints(counts), ints(window)
    branch_kernels.flat_drafts_kernel[(batch,)](
        out,
        out.stride(0),
        torch.from_numpy(chain),
        ints(tokens),
        counts_,
        window_,
        window_.stride(0),
        torch.from_numpy(base),
        ints(chained),
        torch.tensor(sizes, dtype=torch.int32),
        len(sizes),
        longest,
        N,
        WINDOW=WINDOW,
        BRANCHES=BRANCHES,
        LANES=padded_size(N + 1),
        num_warps=1,
    )
    root = base + WINDOW - 1
    room = np.where(chained, 0, N)
    for size in sizes:
        group = PrivateBlocks(size, N)
        fits = group.first(root, BRANCHES + 1) * size <= longest
        room = np.where(fits, np.minimum(room, group.per_row * size - 1 - root % size), 0)
    assert (room == 0).sum() > 2 and (room > 0).sum() > 2
    assert sizes == (4,) or (room[room > 0] < N).any()
    for b in range(batch):
        wanted = chain[b].tolist()
        for j in range(BRANCHES):
            count = min(counts[b, j], room[b])
            assert counts_[b, j] == count
            wanted += [window[b, WINDOW - 1], *tokens[b, j, :count], *[0] * (N - count)]
        assert out[b, :width].tolist() == wanted
    assert (out[:batch, width:] == GUARD).all() and (out[batch] == GUARD).all()
