"""Slots and uniforms of the requests of a runner."""

from functools import partial

import numpy as np
import pytest

from vllm_hsd.core.drafts import DraftStore
from vllm_hsd.runner_v1.requests import RequestLimits, RequestTable


def table_of(num_levels: int, num_slots: int = 8, engine_seed: int = 0) -> RequestTable:
    return RequestTable(num_levels, DraftStore(num_slots, 4), engine_seed)


def slots_of(table: RequestTable, request_ids: list[str], seeds: list[int | None]) -> np.ndarray:
    given = dict(zip(request_ids, seeds, strict=True))
    return table.slots(request_ids, lambda request_id: limits(given[request_id]))


def limits(seed: int | None, request_id: str = "") -> RequestLimits:
    return RequestLimits(seed=seed, eos=-1, max_tokens=10)


def uniforms(table: RequestTable, slots, counts, stream=0) -> list[float]:
    return table.uniforms(np.asarray(slots), np.asarray(counts), stream).tolist()


def test_uniforms_belong_to_seed_and_draw():
    alone, together = table_of(2), table_of(2)
    one = slots_of(alone, ["a"], [7])
    expected = uniforms(alone, one, [3]) + uniforms(alone, one, [2])
    many = slots_of(together, ["x", "a", "y"], [1, 7, None])
    first, second = uniforms(together, many, [2, 3, 1]), uniforms(together, many, [0, 2, 4])
    assert first[2:5] + second[:2] == expected
    assert len(set(first + second)) == 12


def test_unseeded_requests_differ_and_repeat_with_the_engine():
    def drawn(engine_seed: int, prefix: str) -> list[float]:
        table = table_of(1, engine_seed=engine_seed)
        ids = [f"{prefix}{i}" for i in range(4)]
        return uniforms(table, slots_of(table, ids, [None, 5, None, None]), [1] * 4)

    assert drawn(0, "a") == drawn(0, "b")
    assert len(set(drawn(0, "a"))) == 4
    assert drawn(0, "a")[1] == drawn(1, "a")[1]
    assert not set(drawn(0, "a")[2:]) & set(drawn(1, "a")[2:])


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1, -1, -(2**63), 2**100 + 5])
def test_seeds_of_any_size_are_taken(seed):
    table = table_of(1)
    slots = slots_of(table, ["a", "b"], [seed, seed % 2**64])
    first, second = uniforms(table, slots, [1, 1])
    assert first == second


def test_a_slot_that_is_used_again_remembers_nothing():
    table = table_of(2)
    [slot] = slots_of(table, ["a"], [7])
    first = uniforms(table, [slot], [3])
    table.cached[:, slot] = 9
    table.drafts.counts[slot] = 3
    table.thresholds.total[:, slot] = table.thresholds.count[:, slot] = 1
    table.remove("a")
    table.remove("unknown")
    [again] = slots_of(table, ["b"], [7])
    assert again == slot
    assert table.cached[:, again].tolist() == [0, 0] and table.drafts.counts[again] == 0
    assert not table.thresholds.total[:, again].any() and not table.thresholds.count[:, again].any()
    assert uniforms(table, [again], [3]) == first


def test_a_resumed_request_goes_on_with_new_uniforms():
    """Its earlier draws decided tokens that stay: they must not be drawn again."""
    table = table_of(2)
    [slot] = slots_of(table, ["a"], [7])
    before = uniforms(table, [slot], [3])
    table.enter("a", partial(limits, 7), 5)
    assert table.cached[:, slot].tolist() == [5, 5]
    assert not set(uniforms(table, [slot], [3])) & set(before)


def test_waiting_requests_make_room_and_come_back_where_they_were():
    """Every slot is taken by preempted requests, newcomers need them all."""
    table, whole = table_of(2, num_slots=4), table_of(2, num_slots=4)
    old = [f"old{i}" for i in range(4)]
    for each in (table, whole):
        slots = slots_of(each, old, [1, None, 3, None])
        uniforms(each, slots, [3, 2, 1, 0], stream=1)
        each.thresholds.total[:, slots] = np.arange(8).reshape(2, 4)
        each.drafts.counts[slots] = 2
    table.make_room(["old0", "old1", "old2", "old3"])
    assert not table.waiting
    new = ["old2", "new0", "new1", "new2"]
    table.make_room(new)
    assert set(table.waiting) == {"old0", "old1", "old3"}
    assert len(set(slots_of(table, new, [None] * 4).tolist())) == 4
    for request_id in new:
        table.remove(request_id)
    # Not old2: it ended.
    back = slots_of(table, ["old3", "old0", "old1"], [None, 1, None])
    there = slots_of(whole, ["old3", "old0", "old1"], [None, 1, None])
    assert uniforms(table, back, [2, 2, 2], stream=1) == uniforms(whole, there, [2, 2, 2], stream=1)
    assert (table.thresholds.total[:, back] == whole.thresholds.total[:, there]).all()
    assert not table.drafts.counts[back].any() and not table.waiting
