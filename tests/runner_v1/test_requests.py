"""Slots and uniforms of the requests of a runner."""

from types import SimpleNamespace

import numpy as np
import torch

from vllm_hsd.core.cascade import Cascade
from vllm_hsd.core.levels import LevelOptions
from vllm_hsd.runner_v1.request_state import RequestState
from vllm_hsd.runner_v1.requests import RequestTable


def table_of(num_levels: int, num_slots: int = 8, engine_seed: int = 0) -> RequestTable:
    level = SimpleNamespace(context_length=100)
    cascade = Cascade([level] * num_levels, [LevelOptions(4)] * num_levels, num_slots)
    config = SimpleNamespace(seed=engine_seed, get_vocab_size=lambda: 5)
    runner = SimpleNamespace(requests={}, model_config=config, device=torch.device("cpu"))
    return RequestTable(runner, cascade, RequestState.allocate(cascade), coupled=False)


def slots_of(table: RequestTable, request_ids: list[str], seeds: list[int | None]) -> np.ndarray:
    for request_id, seed in zip(request_ids, seeds, strict=True):
        params = SimpleNamespace(seed=seed, ignore_eos=True, max_tokens=10)
        table.runner.requests[request_id] = SimpleNamespace(sampling_params=params, generator=None)
    return table.slots(request_ids)


def uniforms(table: RequestTable, slots, counts, stream=0) -> list[float]:
    return table.state.uniforms(np.asarray(slots), np.asarray(counts), stream).tolist()


def test_unseeded_requests_differ_and_repeat_with_the_engine():
    def drawn(engine_seed: int, prefix: str) -> list[float]:
        table = table_of(1, engine_seed=engine_seed)
        ids = [f"{prefix}{i}" for i in range(4)]
        return uniforms(table, slots_of(table, ids, [None, 5, None, None]), [1] * 4)

    assert drawn(0, "a") == drawn(0, "b")
    assert len(set(drawn(0, "a"))) == 4
    assert drawn(0, "a")[1] == drawn(1, "a")[1]
    assert not set(drawn(0, "a")[2:]) & set(drawn(1, "a")[2:])


def test_a_slot_that_is_used_again_remembers_nothing():
    table = table_of(2)
    [slot] = slots_of(table, ["a"], [7])
    first = uniforms(table, [slot], [3])
    state, thresholds = table.state, table.state.thresholds
    state.cached[:, slot] = 9
    state.drafts.counts[slot] = 3
    thresholds.total[:, slot] = thresholds.count[:, slot] = 1
    table.remove("a")
    table.remove("unknown")
    [again] = slots_of(table, ["b"], [7])
    assert again == slot
    assert state.cached[:, again].tolist() == [0, 0] and state.drafts.counts[again] == 0
    assert not thresholds.total[:, again].any() and not thresholds.count[:, again].any()
    assert uniforms(table, [again], [3]) == first


def test_a_resumed_request_goes_on_with_new_uniforms():
    """Its earlier draws decided tokens that stay: they must not be drawn again."""
    table = table_of(2)
    [slot] = slots_of(table, ["a"], [7])
    before = uniforms(table, [slot], [3])
    table.enter("a", 5)
    assert table.state.cached[:, slot].tolist() == [5, 5]
    assert not set(uniforms(table, [slot], [3])) & set(before)


def test_waiting_requests_make_room_and_come_back_where_they_were():
    """Every slot is taken by preempted requests, newcomers need them all."""
    table, whole = table_of(2, num_slots=4), table_of(2, num_slots=4)
    old = [f"old{i}" for i in range(4)]
    for each in (table, whole):
        slots = slots_of(each, old, [1, None, 3, None])
        uniforms(each, slots, [3, 2, 1, 0], stream=1)
        each.state.thresholds.total[:, slots] = np.arange(8).reshape(2, 4)
        each.state.drafts.counts[slots] = 2
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
    assert (table.state.thresholds.total[:, back] == whole.state.thresholds.total[:, there]).all()
    assert not table.state.drafts.counts[back].any() and not table.waiting
