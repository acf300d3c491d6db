"""Rows of a flat batch, their blocks and copies, against one token after the other; no engine."""

import itertools

import numpy as np
import pytest
from support.row_layout import PrivateBlocks, lay_out


def drafted(random, requests, most, length, room=None):
    """Tokens of (chains [B], branches [B, R - 1])."""
    chain = random.integers(0, length + 1, requests)
    shape = requests, most - 1
    counts = random.integers(0, length + 1, shape) * (random.integers(0, 3, shape) > 0)
    return chain, counts if room is None else np.minimum(counts, room[:, None])


def flat(chain, counts):
    """The list that is scheduled for one request, each token named by its row and its depth."""
    rows = [int(chain), *counts.tolist()]
    return [(0, 0), *((r, d) for r, count in enumerate(rows) for d in range(1, count + 1))]


def path_of(rows, branch):
    """The tokens of a row of the only request, with its root."""
    return [(0, 0), *((branch, d) for d in range(1, rows.counts[0, branch]))]


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_what_is_left_of_the_flat_list(seed):
    random = np.random.default_rng(seed)
    chain, counts = drafted(random, 6, 4, 5)
    counts[0] = 0
    base, scheduled, expected = random.integers(1, 90, 6), [], []
    for i in range(6):
        tokens = flat(chain[i], counts[i])
        cut = len(tokens) if i % 2 else int(random.integers(1, len(tokens) + 1))
        if not counts[i].any():
            cut = 17  # a chunk of a prompt, or placeholders
        scheduled.append(cut)
        expected.append(tokens[:cut])
    rows = lay_out(np.array(scheduled), base, chain, counts)
    starts = np.cumsum(scheduled) - scheduled
    covered = np.zeros(sum(scheduled), dtype=int)
    numbers = dict(zip(zip(rows.request, rows.branch, strict=True), itertools.count()))
    for (i, j), number in numbers.items():
        start, count = rows.start[number], rows.tokens[number]
        assert rows.base[number] == base[i] and rows.begin[number] == base[i] + (j > 0)
        assert rows.begin[number] + count == base[i] + rows.counts[i, j]
        assert rows.number(np.array([i]), np.array([j])) == number
        covered[start : start + count] += 1
        if counts[i].any():
            path = [(0, 0), *((j, d) for d in range(1, rows.counts[i, j]))]
            places = rows.places[i, j, : rows.counts[i, j]]
            assert [expected[i][place] for place in places] == path
        own = rows.start[number] - starts[i]
        assert own == rows.places[i, j, rows.begin[number] - base[i]]
    assert (covered == 1).all()


def test_more_tokens_than_were_drafted_are_a_mistake():
    with pytest.raises(AssertionError, match="are scheduled"):
        lay_out(np.array([9]), np.array([4]), np.array([2]), np.array([[3]]))


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
        chain, counts = drafted(random, 1, most, length, group.room(np.array([base])))
        tokens = flat(chain[0], counts[0])
        rows = lay_out(np.array([len(tokens)]), np.array([base]), chain, counts)
        tables = group.tables(rows, main)
        for source, target in zip(*group.copied_before(rows, tables), strict=True):
            copy(cache, source, target, size)
        for position in range(base, base + chain[0] + 1):
            cache[main[0, position // size] * size + position % size] = tokens[position - base]
        places, positions, slots = group.slots(rows, tables)
        for place, position, slot in zip(places, positions, slots, strict=True):
            assert tokens[place][1] == position - base
            cache[slot] = tokens[place]
        for place, slot in zip(*group.repeated(rows, tables), strict=True):
            cache[slot] = tokens[place]
        for number, branch in enumerate(rows.branch):
            path = path_of(rows, branch)
            for position in range(base + len(path)):
                slot = tables[number, position // size] * size + position % size
                expected = path[position - base] if position >= base else ("text", position)
                assert cache[slot] == expected
        if not rows.branches.size:
            continue
        winner = random.choice(rows.branches)
        path = path_of(rows, rows.branch[winner])
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
