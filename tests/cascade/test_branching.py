"""Drafts of several rows: the table, the tree, and the rule on simulated serving."""

import numpy as np
import pytest
from support.simulated_serving import Drafter, Guess, Serving

from vllm_hsd.cascade.counters import Count
from vllm_hsd.tools.reference.candidates import (
    FIRST,
    MODEL,
    OTHER,
    REMEMBERED,
    Agreement,
    Candidates,
    cell_of,
    pieces,
)


def tree(*offers, most=8, eos=-1) -> Candidates:
    """Candidates whose tokens are as likely as their sources say."""
    found = Candidates(Agreement(), 0, most, eos)
    for voice, tokens, sure in offers:
        found.offer((), voice, voice, tokens, sure)
    found.settle()
    return found


def grown(found: Candidates, chain=(), rows=4, room=8, nodes=16, least=0.0):
    return [
        (piece.row, [node.token for node in piece.path], piece.cost)
        for piece in pieces(found.paths(least), list(chain), rows, room, nodes, least)
    ]


def test_a_path_is_shared_and_its_surest_source_counts_before_anything_is_learned():
    found = tree((FIRST, [1, 2], [0.5, 0.5]), (OTHER, [1, 3], [0.8, 0.4]))
    first = found.root.children[1]
    assert first.survival == pytest.approx(0.8) and list(first.children) == [2, 3]
    assert first.children[3].survival == pytest.approx(0.32)


def test_the_likeliest_tokens_come_first_and_a_new_row_costs_what_it_does_not_share():
    found = tree((FIRST, [1, 2], [0.9, 0.8]), (OTHER, [1, 3], [0.9, 0.7]), (MODEL, [4], [0.3]))
    assert grown(found) == [(0, [1], 1), (0, [1, 2], 1), (1, [1, 3], 1), (2, [4], 1)]
    assert grown(found, rows=2)[-1] == (1, [1, 3], 1)
    assert grown(found, rows=1) == [(0, [1], 1), (0, [1, 2], 1)]
    assert grown(found, nodes=1) == [(0, [1], 1)]
    assert grown(found, least=0.7) == [(0, [1], 1), (0, [1, 2], 1)]


def test_branches_end_where_their_room_does_and_the_chain_does_not():
    found = tree((FIRST, [1, 2, 3, 4], [0.9] * 4), (OTHER, [5, 6, 7], [0.8] * 3))
    for room, branch in enumerate(([], [5], [5, 6], [5, 6, 7])):
        last = {row: tokens for row, tokens, _ in grown(found, room=room)}
        assert last == {0: [1, 2, 3, 4]} | ({1: branch} if branch else {})
    # What it shares with the chain is in its row as well.
    found = tree((FIRST, [1, 2, 3], [0.9] * 3), (OTHER, [1, 2, 4], [0.9, 0.9, 0.5]))
    assert len(grown(found, room=2)) == 3 and grown(found, room=3)[-1] == (1, [1, 2, 4], 1)


def test_a_models_own_draft_stays_the_first_row():
    found = tree((FIRST, [1, 2], [0.9, 0.8]))
    chain = found.draft([5], [0.4], 1)
    found.settle()
    assert grown(found, chain) == [(1, [1], 1), (1, [1, 2], 1)]
    chain = tree((FIRST, [1, 2], [0.9, 0.8])).draft([1], [0.4], 1)
    assert [node.token for node in chain] == [1]


def test_nothing_follows_eos_or_the_longest_draft():
    assert grown(tree((FIRST, [1, 0, 2], [0.9] * 3), eos=0)) == [(0, [1], 1), (0, [1, 0], 1)]
    assert len(grown(tree((FIRST, [1] * 5, [0.9] * 5), most=3))) == 3


def test_what_the_text_became_is_learned():
    table = Agreement()
    for _ in range(int(REMEMBERED) + 100):
        found = Candidates(table, 0, 8, -1)
        found.offer((), FIRST, 0, [1, 2], [0.9, 0.9])
        found.offer((), OTHER, 1, [3], [0.3])
        found.settle()
        assert found.score([3, 1]) == 0
    right, wrong = (cell_of(0, sure) for sure in ((0, 0.3, 0), (0.9, 0, 0)))
    assert table.estimate(wrong, 0.9) < 0.01
    assert table.estimate(right, 0.3) > 0.98 and table.seen[right] <= REMEMBERED + 1
    assert table.seen[cell_of(1, (0.9, 0, 0))] == 0


def test_tokens_of_a_models_own_draft_teach_the_table_nothing():
    """They are accepted more often than the text would have had them."""
    found = tree()
    found.draft([1], [0.5], 0)
    found.offer((), MODEL, 0, [1], [0.6])
    found.settle()
    assert found.score([1]) == 1 and not any(found.table.seen)


@pytest.mark.parametrize("agree", [0.2, 0.6, 0.9])
def test_the_table_is_calibrated_where_sources_agree_and_are_too_sure(agree):
    rng, table, expected, right = np.random.default_rng(1), Agreement(), 0.0, 0
    for step in range(3000):
        found = Candidates(table, 0, 8, -1)
        token = int(rng.integers(1, 4))
        both = rng.random() < 0.5
        found.offer((), FIRST, 0, [token], [0.8])
        found.offer((), OTHER, 1, [token if both else 9], [0.8])
        found.settle()
        text = token if rng.random() < (agree if both else 0.15) else 7
        if step >= 500:
            expected += sum(node.survival for node in found.root.children.values())
            right += text == token
        found.score([text])
    assert 0.95 < right / expected < 1.05


# ---- simulated serving


def target(price: float):
    """A step in which a further token costs a share of it."""
    return lambda tokens: 0.02 * (1 + price * (tokens - 1))


def sources(model=True) -> list:
    """Three that miss different tokens, as suffix trees and a weak head do."""
    lookups = [Guess(0.62, 0.85), Guess(0.5, 0.8)]
    drafter = Drafter(0.42, lambda n: 0.0012 * (1 + 0.02 * n), sureness=0.6, near=0.36)
    return [*lookups, drafter][: 2 + model]


def weak() -> list:
    """A good lookup and a head that adds little, at a ninth of a step a pass."""
    return [Guess(0.7, 0.95), Drafter(0.3, lambda n: 0.0022, sureness=0.4, near=0.25)]


def few_are_free(tokens: int) -> float:
    """A step in which five tokens cost as much as one, and further ones a quarter each."""
    return 0.02 * (1 + 0.25 * max(tokens - 5, 0))


def served(price: float, levels, branches=1, size=1) -> tuple[float, float, Serving]:
    """(speed-up over no drafts once learned, rows per draft, the simulation)."""
    serving = Serving(target(price), levels, size, branches=branches)
    serving.run(400 // size)
    counts = serving.cascade.counters
    counts.take()
    speed = serving.run(800 // size) * target(price)(size) / size
    rows = counts.rows[0, Count.branches] / counts.rows[0, Count.requested]
    return speed, 1 + rows, serving


def test_branches_gain_where_tokens_are_cheap():
    fast, rows, serving = served(0.005, [sources()], 4)
    assert rows > 1.4
    assert fast > 1.08 * served(0.005, [sources()])[0]
    assert fast > 1.08 * served(0.005, sources()[:1])[0]
    counts = serving.cascade.counters.rows
    for column in (Count.branches, Count.branch_tokens, Count.branches_followed):
        assert counts[0, column] == counts[1:, column].sum() > 0
    assert counts[0, Count.followed_tokens] >= counts[0, Count.branches_followed]
    assert np.count_nonzero(counts[1:, Count.branches_followed]) >= 2


def test_a_request_without_room_for_branches_gets_a_chain():
    """What its tree would have put into branches is not lost."""
    serving = Serving(target(0.005), [sources(False)], branches=4)
    serving.cascade.branches.room[:] = 0
    serving.run(400)
    alone = Serving(target(0.005), [sources(False)])
    alone.run(400)
    assert not serving.cascade.counters.rows[0, Count.branches]
    assert serving.run(400) > 0.97 * alone.run(400)


def test_a_choice_does_not_settle_for_less_after_a_stalled_step():
    """At this price and noise a step stalls whose size was not met for long."""
    assert served(0.04, [sources()])[0] > 0.97 * served(0.04, sources()[:1])[0]


def test_branches_do_no_harm_where_tokens_are_expensive():
    fast, rows, _ = served(0.04, [weak()], 4)
    assert rows < 1.12 and fast > 0.98 * served(0.04, weak()[:1])[0]
    assert served(0.1, [sources()], 4)[0] > 1.01 * served(0.1, sources()[:1])[0]


def test_a_model_that_does_not_pay_is_not_asked():
    """Few tokens cost less than times scatter: as if they cost nothing, it was asked for .4."""
    counts = served(0.018, [weak()], 4)[2].cascade.counters.rows[0]
    assert counts[Count.forwards] < 0.1 * counts[Count.requested]


def test_a_model_is_asked_where_the_tokens_that_it_adds_are_free():
    """At the mean price of a whole draft it was asked in .02 of the steps, for 1.63, not 1.9."""
    level = [Guess(0.6, 0.5), Drafter(0.4, lambda n: 0.003, sureness=0.5, near=0.3)]
    serving = Serving(few_are_free, [level], branches=4)
    serving.run(400)
    serving.cascade.counters.take()
    assert serving.run(800) * few_are_free(1) > 1.75
    counts = serving.cascade.counters.rows[0]
    assert counts[Count.forwards] > 0.3 * counts[Count.requested]


def test_a_full_machine_gets_chains_and_then_nothing():
    _, few, one = served(0.02, [sources(False)], 4)
    _, many, eight = served(0.02, [sources(False)], 4, 8)
    assert many < few
    assert 1.5 < np.mean(eight.passed[-50:]) < 0.75 * np.mean(one.passed[-400:])
    assert np.median(served(2.0, [sources()], 4)[2].passed[-200:]) == 1
