"""Slots and coins of the requests of a runner."""

import numpy as np
import pytest

from vllm_hsd.runner_v1.requests import RequestTable


def coins(table: RequestTable, slots, counts, stream=0) -> list[float]:
    return table.coins(np.asarray(slots), np.asarray(counts), stream).tolist()


def test_coins_belong_to_seed_and_draw():
    alone, together = RequestTable(2, 0), RequestTable(2, 0)
    one = alone.slots(["a"], [7])
    expected = coins(alone, one, [3]) + coins(alone, one, [2])
    many = together.slots(["x", "a", "y"], [1, 7, None])
    first, second = coins(together, many, [2, 3, 1]), coins(together, many, [0, 2, 4])
    assert first[2:5] + second[:2] == expected
    assert len(set(first + second)) == 12


def test_levels_toss_coins_of_their_own():
    table = RequestTable(2, 0)
    slot = table.slots(["a"], [7])
    found = [coins(table, slot, [4], stream) for stream in range(3)]
    assert len({coin for row in found for coin in row}) == 12


def test_unseeded_requests_differ_and_repeat_with_the_engine():
    def tossed(engine_seed: int, prefix: str) -> list[float]:
        table = RequestTable(1, engine_seed)
        slots = table.slots([f"{prefix}{i}" for i in range(4)], [None, 5, None, None])
        return coins(table, slots, [1] * 4)

    assert tossed(0, "a") == tossed(0, "b")
    assert len(set(tossed(0, "a"))) == 4
    assert tossed(0, "a")[1] == tossed(1, "a")[1]
    assert not set(tossed(0, "a")[2:]) & set(tossed(1, "a")[2:])


def test_a_slot_that_is_used_again_remembers_nothing():
    table = RequestTable(2, 0)
    [slot] = table.slots(["a"], [7])
    first = coins(table, [slot], [3])
    table.kv[:, slot] = 9
    table.thresholds.total[:, slot] = table.thresholds.count[:, slot] = 1
    table.remove("a")
    table.remove("nobody")
    [again] = table.slots(["b"], [7])
    assert again == slot
    assert table.kv[:, again].tolist() == [0, 0] and table.pending[again] is None
    assert not table.thresholds.total[:, again].any() and not table.thresholds.count[:, again].any()
    assert coins(table, [again], [3]) == first


def test_restart_keeps_the_coins_of_a_preempted_request():
    """Its earlier draws decided tokens that stay: they must not be drawn again."""
    table = RequestTable(2, 0)
    [slot] = table.slots(["a"], [7])
    before = coins(table, [slot], [3])
    table.restart("a", 7, 5)
    assert table.kv[:, slot].tolist() == [5, 5]
    assert not set(coins(table, [slot], [3])) & set(before)


@pytest.mark.parametrize("size", [16, 17, 100])
def test_growing_keeps_what_is_there(size):
    table = RequestTable(2, 0)
    [first] = table.slots(["first"], [7])
    table.kv[:, first] = [3, 4]
    before = coins(table, [first], [2])
    slots = table.slots([f"r{i}" for i in range(size)], list(range(size)))
    assert len({first, *slots.tolist()}) == size + 1
    assert table.kv[:, first].tolist() == [3, 4] and not table.kv[:, slots].any()
    assert table.slots(["first"], [7])[0] == first
    assert not set(coins(table, [first], [2])) & set(before)
    fresh = RequestTable(2, 0)
    assert coins(table, slots[-1:], [2]) == coins(fresh, fresh.slots(["x"], [size - 1]), [2])


def test_coins_are_the_same_however_many_are_tossed_at_once():
    """Also where the row of coins tossed ahead runs out, or is too short for one request."""
    one_by_one, at_once = RequestTable(1, 0), RequestTable(1, 0)
    single, both = one_by_one.slots(["a"], [7]), at_once.slots(["a", "b"], [7, 8])
    first = coins(at_once, both, [250, 1])[:250]
    long = coins(at_once, both, [300, 3])
    expected = [coins(one_by_one, single, [1])[0] for _ in range(550)]
    assert first + long[:300] == expected
    fresh = RequestTable(1, 0)
    assert long[300:] == coins(fresh, fresh.slots(["b"], [8]), [4])[1:]
