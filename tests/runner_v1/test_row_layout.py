"""Rows of a flat batch, their blocks and copies, against one token after the other; no engine."""

import itertools

import numpy as np
import pytest

from vllm_hsd.runner_v1.row_layout import PrivateBlocks, flat_tokens, lay_out


def drafted(random, requests, most, length):
    """(chain [B], branches [B, R - 1]) token counts, zeros in any place."""
    chain = random.integers(0, length + 1, requests)
    branches = random.integers(0, length + 1, (requests, most - 1))
    branches *= random.integers(0, 2, branches.shape) & random.integers(0, 3, (requests, 1)) > 0
    return chain, branches


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_what_is_left_of_the_flat_list(seed):
    random = np.random.default_rng(seed)
    chain, branches = drafted(random, 6, 4, 5)
    branches[0] = 0
    base, scheduled, expected = random.integers(1, 90, 6), [], []
    for i, (count, others) in enumerate(zip(chain, branches, strict=True)):
        lists = [[(i, 0, d) for d in range(count)]]
        lists += [[(i, j + 1, d) for d in range(other)] for j, other in enumerate(others)]
        flat = [("root",), *flat_tokens(("root",), lists[0], lists[1:], others.tolist())]
        cut = len(flat) if i % 2 else int(random.integers(1, len(flat) + 1))
        if not others.any():
            cut = 17  # a chunk of a prompt, or placeholders
        scheduled.append(cut)
        expected.append(flat[:cut])
    rows = lay_out(np.array(scheduled), base, chain, branches)
    starts = np.cumsum(scheduled) - scheduled
    covered = np.zeros(sum(scheduled), dtype=int)
    numbers = dict(zip(zip(rows.request, rows.branch, strict=True), itertools.count()))
    for (i, j), number in numbers.items():
        start, count = rows.start[number], rows.tokens[number]
        assert count == rows.counts[i, j] > 0 and rows.base[number] == base[i]
        assert start == starts[i] + rows.offsets[i, j]
        assert rows.number(np.array([i]), np.array([j])) == number
        assert (rows.begins[start : start + count] == rows.offsets[i, j]).all()
        covered[start : start + count] += 1
        if branches[i].any():
            own = expected[i][start - starts[i] : start - starts[i] + count]
            assert own == [("root",), *((i, j, d) for d in range(count - 1))]
    assert (covered == 1).all()


def test_more_tokens_than_were_drafted_are_a_mistake():
    with pytest.raises(AssertionError, match="are scheduled"):
        lay_out(np.array([9]), np.array([4]), np.array([2]), np.array([[3]]))


@pytest.mark.parametrize(("size", "length"), [(4, 3), (16, 8), (16, 24), (32, 3), (128, 8)])
@pytest.mark.parametrize("most", [2, 4])
def test_branches_compute_what_they_would_alone(size, length, most):
    """A cache of (text so far) per slot: every token sees its own row's text, and no other's."""
    random = np.random.default_rng(size + length)
    group = PrivateBlocks(size, length)
    for base in range(2 * size, 3 * size, max(size // 32, 1)):
        flat = most * (length + 1)
        # What the scheduler reserves where one token is computed.
        blocks = -(-(base + 1 + group.lookahead(most)) // size)
        main = random.permutation(200)[None, :blocks]
        cache = {}
        for position in range(base):
            cache[main[0, position // size] * size + position % size] = ("text", position)
        counts = np.minimum(random.integers(1, length + 1, (1, most - 1)), group.room(base))
        counts[0, 0] = min(length, group.room(base))
        assert counts.min() >= 0
        chain = np.array([random.integers(0, length + 1)])
        scheduled = chain + 1 + (counts + (counts > 0)).sum(1)
        assert scheduled[0] <= flat
        rows = lay_out(scheduled, np.array([base]), chain, counts)
        tables = group.tables(rows, main)
        for source, target in zip(*group.copied_before(rows, tables), strict=True):
            copy(cache, source, target, size)
        places, positions, slots = group.slots(rows, tables)
        for place, position, slot in zip(places, positions, slots, strict=True):
            number = rows.start.searchsorted(place, side="right") - 1
            cache[slot] = ("row", rows.branch[number], position)
        for position in range(base, base + chain[0] + 1):
            cache[main[0, position // size] * size + position % size] = ("row", 0, position)
        for number, branch in enumerate(rows.branch):
            for position in range(base + rows.tokens[number]):
                slot = tables[number, position // size] * size + position % size
                expected = ("row", branch, position) if position >= base else ("text", position)
                assert cache[slot] == expected
        if not rows.branches.size:
            continue
        winner = random.choice(rows.branches)
        kept = int(random.integers(1, rows.tokens[winner]))
        assert not set(main[0, : base // size]) & set(tables[rows.branches][:, base // size])
        changed = group.copied_after(rows, tables, np.array([winner]), np.array([kept]))
        assert min(np.flatnonzero(np.isin(main[0], changed[1]))) >= (base + 1) // size
        for source, target in zip(*changed, strict=True):
            copy(cache, source, target, size)
        for position in range(base + kept + 1):
            found = cache[main[0, position // size] * size + position % size]
            branch = rows.branch[winner]
            if position == base:
                # The root of any row is the same.
                assert found in (("row", 0, base), ("row", branch, base))
            else:
                assert found == (
                    ("row", branch, position) if position > base else ("text", position)
                )


def copy(cache, source, target, size):
    for offset in range(size):
        cache.pop(target * size + offset, None)
        if source * size + offset in cache:
            cache[target * size + offset] = cache[source * size + offset]


def test_private_blocks_of_small_blocks_never_cut_a_branch():
    for size, length in ((16, 8), (16, 24), (32, 8), (4, 3)):
        room = PrivateBlocks(size, length).room(np.arange(size))
        assert room.min() >= length
    assert (PrivateBlocks(128, 8).room(np.arange(128)) >= 8).mean() > 0.9
    assert PrivateBlocks(128, 8).lookahead(4) == 8 + 3 * 128
