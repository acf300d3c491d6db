"""The kernels between forward passes against their reference, along random proposals."""

import pytest
import torch
from support import step_reference
from support.proposal_states import (
    LENGTHS,
    MAX_MODEL_LEN,
    VOCABULARY,
    GuardedState,
    assert_equal_states,
    block_tables,
    copied,
    runner_tensors,
    schedule_of,
)
from support.proposal_walk import walk

from vllm_hsd.cascade import cascade_steps, lookups
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.cascade.schedule import Draft

SCHEDULE = schedule_of(3, 8)


@pytest.mark.every_kernel
@pytest.mark.parametrize(
    ("lengths", "lookup", "unverified", "horizontal", "seed"),
    [
        ((4,), False, False, 0, 0),
        ((3, 8), False, False, 0, 1),
        (LENGTHS, False, False, 0, 2),
        ((3, 8), True, False, 0, 3),
        # An even seed passes on committed tokens, too: the same of one length.
        ((3, 8), True, True, 0, 5),
        (LENGTHS, False, True, 0, 4),
        ((2, 8), False, False, 3, 6),
        ((2, 8), True, False, 3, 8),
        *(
            pytest.param(LENGTHS, s % 2 > 0, s % 3 == 0, s % 4 // 2, s, marks=pytest.mark.slow)
            for s in range(10, 20)
        ),
    ],
)
def test_every_step_equals_its_reference(
    lengths, lookup, unverified, horizontal, seed, monkeypatch
):
    """Padding, prompt chunks, texts shorter than the window or near max_model_len, guard rows."""
    # Texts of several chunks.
    monkeypatch.setattr(lookups, "search_chunk", lambda *_: 16)
    schedule = schedule_of(*lengths, lookup=lookup, horizontal_tokens=horizontal)
    walk(schedule, seed, batch=7, num_reqs=6, lookup=lookup, unverified=unverified)


def test_a_batch_of_padding_drafts_nothing():
    walk(SCHEDULE, seed=1, batch=2, num_reqs=0, lookup=False)


def stage(state: ProposalState, seed: int, num_reqs: int, schedule=SCHEDULE) -> None:
    tensors = runner_tensors(seed, num_reqs, schedule.window)
    cascade_steps.stage(state, schedule, **tensors, scales=torch.ones(2))


def test_no_entry_is_written_past_a_row_of_the_block_table():
    """There lie the next request's blocks, of a level in the target's cache the target's own."""
    # `groups` holds addresses of the tables.
    state, (groups, _tables) = GuardedState(SCHEDULE, 5).state, block_tables(0)
    stage(state, 0, 5)
    place = (state, SCHEDULE, SCHEDULE.ops[0], groups, MAX_MODEL_LEN)
    cascade_steps.place(*place)
    fed = 5 * SCHEDULE.ops[0].query_length
    whole, position = state.slot_mapping[:, :fed].clone(), state.positions[:fed]
    groups.table_strides.fill_(2)
    cascade_steps.place(*place)
    for g, size in enumerate(groups.block_sizes.tolist()):
        inside = position // size < 2
        cut = state.slot_mapping[g, :fed]
        assert (cut[~inside] == -1).all() and ((cut >= 0) == (inside & (whole[g] >= 0))).all()
    assert (whole[0] >= 0).sum() > (state.slot_mapping[0, :fed] >= 0).sum()


def test_a_pass_that_begins_before_the_window_writes_nothing_there():
    """As long as another request of its batch needs."""
    op = max((op for op in SCHEDULE.ops if isinstance(op, Draft)), key=lambda op: op.query_length)
    state, (groups, tables) = GuardedState(SCHEDULE, 5).state, block_tables(0)
    stage(state, 0, 5)
    before = op.query_length - 1
    state.end.fill_(op.query_length - before)
    expected = copied(state)
    place = (SCHEDULE, op, groups, MAX_MODEL_LEN)
    cascade_steps.place(state, *place)
    step_reference.place(expected, *place, tables=tables)
    assert_equal_states(state, expected)
    fed = state.slot_mapping[:, : 5 * op.query_length].view(len(tables), 5, -1)
    assert before > 0 and (fed[..., :before] == -1).all() and (fed[..., before:] >= 0).any()


@pytest.mark.every_kernel
def test_bigram_chains_end_where_there_is_no_successor():
    schedule = schedule_of(3, 8, lookup=True)
    guarded = GuardedState(schedule, 6, lookup=True)
    stage(guarded.state, 4, 5, schedule)
    expected = copied(guarded.state)
    successor = torch.tensor([3, 2, -1, 1, 4], dtype=torch.int32)
    lookups.lookup_bigram(guarded.state, successor)
    step_reference.lookup_bigram(expected, successor)
    assert_equal_states(guarded.state, expected)
    assert len(set(guarded.state.drafted[0].tolist())) > 1
    guarded.assert_guards()


def test_rows_of_another_dtype_are_refused():
    """Rounding a row after its token was drawn would change the distribution that is claimed."""
    state = GuardedState(SCHEDULE, 2).state
    logits = torch.zeros(2, VOCABULARY)
    with pytest.raises(ValueError, match=r"levels\[0\] are torch.float32"):
        cascade_steps.commit_draft(state, SCHEDULE.ops[0], logits, *[logits[:, 0]] * 3)
