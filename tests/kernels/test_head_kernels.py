"""What an EAGLE-3 head is fed: the steps of head_steps.py against the same in plain Python.

The latter take `tables`, what groups.table_ptrs points at.
"""

import copy

import pytest
import torch
from support.proposal_states import (
    MAX_MODEL_LEN,
    MAX_NUM_REQS,
    GuardedState,
    block_tables,
    poison,
    runner_tensors,
    schedule_of,
)

from vllm_hsd.cascade import cascade_steps, head_steps
from vllm_hsd.cascade.head_steps import HeadInputs

BATCH, QUERY = 7, 9
SCHEDULE = schedule_of(3, QUERY - 1)


def next_tokens(input_ids, index, query_start_loc, positions, text, length, longest):
    """Where there is a next token."""
    for b, slot in enumerate(index.tolist()):
        for t in range(int(query_start_loc[b]), int(query_start_loc[b + 1])):
            if int(positions[t]) + 1 < int(length[slot]):
                input_ids[t] = text[slot, positions[t] + 1]


def read_step(
    inputs, groups, max_model_len, *, index, query_start_loc, positions, text, length, tables
):
    """Rows of a request that hold nothing are -1 in all tensors."""
    reading, q = inputs.reading, inputs.reading.query_length
    for tensor in (reading.input_ids, reading.slot_mapping, inputs.source):
        tensor.fill_(-1)
    reading.seq_lens.zero_()
    for b in range(reading.batch):
        count = min(b + 1, len(index))
        reading.query_start_loc[b + 1] = count * q
    for b, slot in enumerate(index.tolist()):
        steps = range(int(query_start_loc[b]), int(query_start_loc[b + 1]))
        place = {int(positions[t]): t for t in steps}
        # The token after the step's last one is known, of a prompt too; drafts may be rejected.
        known = [e for e in place if e + 1 < int(length[slot])]
        last = max(known)
        lowest = max(min(max(last - q + 1, min(place)), max_model_len - q), 0)
        reading.seq_lens[b] = lowest + q
        inputs.last[b] = b * q + last - lowest
        for i in range(q):
            entry, at = lowest + i, b * q + i
            reading.positions[at] = entry
            if entry > last:
                continue
            reading.input_ids[at] = text[slot, entry + 1]
            if entry not in place:
                continue  # near max_model_len, computed in an earlier step
            inputs.source[at] = place[entry]
            _write(reading.slot_mapping, at, slot, entry, groups, tables)


def place_entry(inputs, state, schedule, back, groups, max_model_len, *, tables):
    one, top, states = inputs.drafting, schedule.num_levels - 1, inputs.own.shape[1]
    num_reqs = int(state.num_reqs)
    one.slot_mapping.fill_(-1)
    for b in range(state.batch):
        index = int(state.end[b]) - 1 - back
        entry = int(state.base[b]) + index - 1
        fed = min(max(entry, 0), max_model_len - 1)
        one.input_ids[b] = max(int(state.window[b, max(index, 0)]), 0)
        one.positions[b], one.seq_lens[b] = fed, fed + 1 if b < num_reqs else 0
        one.query_start_loc[b + 1] = min(b + 1, num_reqs)
        number = index - (schedule.window - 1)
        inputs.reads[b] = b * states + max(number, 0)
        inputs.writes[b] = b * states + (number + 1 if number >= 0 else states - 1)
        running = state.drafted[top, b] < state.requested[top, b] and state.slot[b] >= 0
        if running and number > 0 and entry <= int(state.limit[b]):
            _write(one.slot_mapping, b, int(state.slot[b]), entry, groups, tables)


def _write(slot_mapping: torch.Tensor, at: int, slot: int, position: int, groups, tables) -> None:
    for g, table in enumerate(tables):
        size = int(groups.block_sizes[g])
        block, offset = divmod(position, size)
        slot_mapping[g, at] = int(table[slot, block]) * size + offset


def head_inputs() -> HeadInputs:
    """With anything in their tensors."""
    inputs = HeadInputs.allocate(
        SCHEDULE,
        batch=BATCH,
        query_length=QUERY,
        hidden_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    inputs.set_kv_groups(2)
    for tensor in (*inputs.reading, *inputs.drafting, inputs.source, inputs.last):
        poison(tensor)
    inputs.reading.query_start_loc[0] = inputs.drafting.query_start_loc[0] = 0
    return inputs


def step_of(seed: int, num_reqs: int) -> dict[str, torch.Tensor]:
    """A step of the target: drafts with some accepted, prompts in chunks, the last places."""
    g = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=g))

    slots = torch.randperm(MAX_NUM_REQS, generator=g)[:num_reqs]
    length = torch.zeros(MAX_NUM_REQS, dtype=torch.int32)
    starts, positions = [0], []
    for b, slot in enumerate(slots.tolist()):
        if b % 3 == 0:  # a chunk of a prompt
            first = number(0, 1) * number(1, 15)
            count = number(1, 20)
            length[slot] = first + count + number(1, 3)
        else:
            first = MAX_MODEL_LEN - 2 - number(0, 5) if b == 4 else number(1, 20)
            count = min(number(1, QUERY), MAX_MODEL_LEN - first)
            length[slot] = first + number(1, count) + 1
        length[slot].clamp_(max=MAX_MODEL_LEN)
        positions += range(first, first + count)
        starts.append(len(positions))
    text = torch.randint(0, 50, (MAX_NUM_REQS, MAX_MODEL_LEN), generator=g, dtype=torch.int32)
    return {
        "index": slots,
        "query_start_loc": torch.tensor(starts, dtype=torch.int32),
        "positions": torch.tensor(positions),
        "text": text,
        "length": length,
    }


@pytest.mark.every_kernel
@pytest.mark.parametrize("num_reqs", [1, 5, BATCH])
@pytest.mark.parametrize("seed", range(4))
def test_a_step_of_the_target_is_read_as_by_its_reference(seed, num_reqs):
    step, (groups, tables) = step_of(seed, num_reqs), block_tables(seed)
    inputs = head_inputs()
    expected = copy.deepcopy(inputs)
    head_steps.read_step(inputs, groups, MAX_MODEL_LEN, **step)
    read_step(expected, groups, MAX_MODEL_LEN, **step, tables=tables)
    fed = num_reqs * QUERY
    mine, theirs = inputs.reading, expected.reading
    assert mine.seq_lens.equal(theirs.seq_lens)
    assert mine.query_start_loc.equal(theirs.query_start_loc)
    assert mine.slot_mapping.equal(theirs.slot_mapping)
    assert mine.positions[:fed].equal(theirs.positions[:fed])
    assert inputs.last[:num_reqs].equal(expected.last[:num_reqs])
    assert (mine.slot_mapping >= 0).any()
    for found, wanted in ((mine.input_ids, theirs.input_ids), (inputs.source, expected.source)):
        assert found[wanted >= 0].equal(wanted[wanted >= 0])
    # What nothing looks at is a token and a place nevertheless.
    assert (mine.input_ids >= 0).all() and (mine.positions >= 0).all()
    assert (inputs.source >= 0).all() and inputs.source.max() < len(step["positions"])
    assert (inputs.last < BATCH * QUERY).all() and (inputs.last >= 0).all()


@pytest.mark.every_kernel
@pytest.mark.parametrize("chunk", [4, 1024])
def test_tokens_after_those_of_a_step(chunk, monkeypatch):
    monkeypatch.setattr(head_steps, "TOKEN_CHUNK", chunk)
    step = step_of(1, BATCH)
    found = torch.full((len(step["positions"]) + 2,), -1, dtype=torch.int32)
    wanted = found.clone()
    longest = int(step["query_start_loc"].diff().max())
    head_steps.next_tokens(found, **step, longest=longest)
    next_tokens(wanted, **step, longest=longest)
    assert found[wanted >= 0].equal(wanted[wanted >= 0])
    assert (found[:-2] >= 0).all() and (found[-2:] == -1).all()


@pytest.mark.every_kernel
@pytest.mark.parametrize("seed", range(3))
def test_an_entry_of_a_drafted_token_is_placed_as_by_its_reference(seed):
    """Of committed tokens too, and of requests that draft nothing or are done."""
    state = GuardedState(SCHEDULE, BATCH).state
    tensors = runner_tensors(seed, BATCH - 1, SCHEDULE.window) | {"scales": torch.ones(2)}
    cascade_steps.stage(state, SCHEDULE, **tensors)
    g = torch.Generator().manual_seed(seed)
    drafted = torch.randint(0, 6, (BATCH,), generator=g, dtype=torch.int32)
    state.end += drafted
    state.window[:, SCHEDULE.window :] = 3
    state.drafted[1] = drafted // 2
    (groups, tables), written = block_tables(seed), 0
    for back in range(3):
        inputs = head_inputs()
        expected = copy.deepcopy(inputs)
        head_steps.place_entry(inputs, state, SCHEDULE, back, groups, MAX_MODEL_LEN)
        place_entry(expected, state, SCHEDULE, back, groups, MAX_MODEL_LEN, tables=tables)
        for mine, theirs in zip(inputs.drafting, expected.drafting, strict=True):
            assert mine.equal(theirs)
        assert inputs.reads.equal(expected.reads) and inputs.writes.equal(expected.writes)
        # No two requests write one state.
        assert len(inputs.writes.unique()) == BATCH
        assert inputs.writes.max() < inputs.own.shape[0] * inputs.own.shape[1]
        written += int((inputs.drafting.slot_mapping >= 0).sum())
    assert written > 0
