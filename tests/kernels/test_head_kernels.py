"""What an EAGLE-3 head is fed, against its reference."""

import copy

import pytest
import torch
from support import head_reference
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
    head_reference.read_step(expected, groups, MAX_MODEL_LEN, **step, tables=tables)
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
    head_reference.next_tokens(wanted, **step, longest=longest)
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
        head_reference.place_entry(
            expected, state, SCHEDULE, back, groups, MAX_MODEL_LEN, tables=tables
        )
        for mine, theirs in zip(inputs.drafting, expected.drafting, strict=True):
            assert mine.equal(theirs)
        assert inputs.reads.equal(expected.reads) and inputs.writes.equal(expected.writes)
        # No two requests write one state.
        assert len(inputs.writes.unique()) == BATCH
        assert inputs.writes.max() < inputs.own.shape[0] * inputs.own.shape[1]
        written += int((inputs.drafting.slot_mapping >= 0).sum())
    assert written > 0
