"""Rows of requests, their blocks and copies, against one token after the other; no engine."""

import numpy as np
import pytest
from support.row_layout import PrivateBlocks, whole_rows


def path_of(rows, row):
    """The tokens of a row from its root on, each named by its row and its place."""
    return [(0, 0), *((rows.branch[row], place) for place in range(1, rows.held[row]))]


@pytest.mark.parametrize(("size", "length"), [(4, 3), (16, 8), (16, 24), (32, 3), (128, 8)])
@pytest.mark.parametrize("most", [2, 4])
def test_branches_compute_what_they_would_alone(size, length, most):
    """A cache of what was computed by slot: every token sees its own row's text, and no other's."""
    random = np.random.default_rng(size + length)
    group = PrivateBlocks(size, length)
    for base in range(2 * size, 3 * size, max(size // 32, 1)):
        # What the scheduler reserves where one token is computed.
        blocks = -(-(base + 1 + group.lookahead(most)) // size)
        main = random.permutation(200)[None, :blocks]
        cache = {}
        for position in range(base):
            cache[main[0, position // size] * size + position % size] = ("text", position)
        drafted = random.integers(0, length + 1, (1, most)) * (random.integers(0, 3, most) > 0)
        at = np.array([base])
        rows = whole_rows(at, drafted[:, 0], np.minimum(drafted[:, 1:], group.room(at)[:, None]))
        tables = group.tables(rows, main)
        for source, target in zip(*group.copied_before(rows, tables), strict=True):
            copy(cache, source, target, size)
        alive = [0, *rows.branches]
        for row in alive:
            cache |= dict(zip(group.slots(rows, tables, row), path_of(rows, row), strict=True))
        for row in alive:
            path = path_of(rows, row)
            for position in range(base + len(path)):
                slot = tables[row, position // size] * size + position % size
                expected = path[position - base] if position >= base else ("text", position)
                assert cache[slot] == expected
        if not rows.branches.size:
            continue
        winner = random.choice(rows.branches)
        path = path_of(rows, winner)
        kept = int(random.integers(1, len(path)))
        assert not set(main[0, : base // size]) & set(tables[rows.branches][:, base // size])
        changed = group.copied_after(rows, tables, np.array([winner]), np.array([kept]))
        assert min(np.flatnonzero(np.isin(main[0], changed[1]))) >= (base + 1) // size
        for source, target in zip(*changed, strict=True):
            copy(cache, source, target, size)
        for position in range(base + kept + 1):
            found = cache[main[0, position // size] * size + position % size]
            assert found == (path[position - base] if position >= base else ("text", position))


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
