"""The kernels that end drafts by entropy against their reference, on random states."""

import copy

import pytest
import torch
from support import step_reference
from support.proposal_states import (
    GuardedState,
    assert_equal_states,
    copied,
    runner_tensors,
    schedule_of,
)
from support.proposal_walk import random_result

from vllm_hsd.cascade import cascade_steps, entropy_stopping
from vllm_hsd.cascade.entropy_stopping import DeviceThresholds
from vllm_hsd.cascade.schedule import Draft
from vllm_hsd.tools.reference.stopping import entropy_nats

VOCABULARY = 70


def random_state(schedule, seed: int):
    """Requests of any room in the middle of a proposal, and entropies that are left over."""
    g = torch.Generator().manual_seed(seed)
    state = GuardedState(schedule, 5).state
    scales = {"scales": torch.ones(schedule.num_levels)}
    cascade_steps.stage(state, schedule, **runner_tensors(seed, 4, schedule.window), **scales)
    for k, length in enumerate(schedule.draft_lengths):
        state.requested[k].copy_(torch.randint(0, length + 1, (5,), generator=g))
        state.drafted[k].copy_(torch.randint(0, length, (5,), generator=g))
        state.drafted[k].clamp_(max=state.requested[k])
        state.requested[k, state.slot < 0] = state.drafted[k, state.slot < 0] = 0
    return state, g


def random_thresholds(state, stopping, g) -> DeviceThresholds:
    thresholds = DeviceThresholds(stopping, state)
    thresholds.count.random_(0, 3, generator=g)
    # About as high as the entropies of normal logits.
    thresholds.total.copy_(thresholds.count * (3.3 + 0.1 * torch.randn(1, generator=g).double()))
    pairs = zip(thresholds.entropy, thresholds.drafter, strict=True)
    for k, (entropy, drafter) in enumerate(pairs):
        drafter.random_(0, k + 1, generator=g)
        entropy.normal_(generator=g)
        entropy[~torch.tensor(stopping)[drafter.long()]] = float("nan")
    return thresholds


def assert_equal(one: DeviceThresholds, other: DeviceThresholds) -> None:
    assert one.count.equal(other.count)
    torch.testing.assert_close(one.total, other.total)
    mine, theirs = one.entropy + one.drafter, other.entropy + other.drafter
    torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.every_kernel
@pytest.mark.parametrize("seed", range(6))
def test_every_op_ends_drafts_as_its_reference(seed):
    """Drafts, verifications and levels that pass on, over several chunks of a row."""
    schedule = schedule_of(2, 3, 7)
    ended = 0
    for at, op in enumerate(schedule.ops):
        state, g = random_state(schedule, seed + at)
        stopping = torch.rand(3, generator=g) < 0.7
        thresholds = random_thresholds(state, stopping.tolist(), g)
        result, rows = None, 1
        if not isinstance(op, Draft):
            room = state.drafted[op.level] < state.requested[op.level]
            state.origin.copy_(torch.where(room, state.drafted[op.level], -1))
            used = state.drafted[op.level - 1] + 1
            if seed % 3:
                result, rows = random_result(op, state, g), op.draft_length + 1
                used = result.num_emitted
            fits = state.origin + used <= state.lse[op.level].shape[1]
            state.origin.copy_(torch.where(fits, state.origin, -1))
        logits = torch.randn(5 * rows, VOCABULARY, generator=g).bfloat16()
        logits[torch.rand(logits.shape, generator=g) < 0.3] = -float("inf")
        logits[:, 0] = 0
        theirs, before = copied(state), state.requested.clone()
        expected = copy.deepcopy(thresholds)
        entropy_stopping.end_unsure_drafts(thresholds, state, op, logits, result)
        step_reference.end_unsure_drafts(expected, theirs, op, logits, result)
        assert_equal_states(state, theirs)
        assert_equal(thresholds, expected)
        ended += int((state.requested != before).sum())
    assert ended


@pytest.mark.parametrize("vocabulary", [70, 20000])
def test_entropies_of_rows_of_several_chunks(vocabulary):
    schedule = schedule_of(2, 3, 7)
    state, g = random_state(schedule, 1)
    state.requested[0], state.drafted[0] = 2, 0
    state.slot.copy_(torch.arange(5))
    logits = torch.randn(5, vocabulary, generator=g) * torch.tensor([0.0, 1, 3, 30, 3])[:, None]
    logits[3, 1] = float("nan")
    logits[4, 100:] = -float("inf")
    thresholds = DeviceThresholds([True, False, False], state)
    entropy_stopping.end_unsure_drafts(thresholds, state, schedule.ops[0], logits)
    found = thresholds.entropy[0][:, 0].double()
    assert found[3].isnan()
    known = torch.tensor([0, 1, 2, 4])
    expected = torch.from_numpy(entropy_nats(logits[known].double()))
    torch.testing.assert_close(found[known], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.every_kernel
@pytest.mark.parametrize("seed", range(4))
def test_what_the_target_rejects_moves_the_threshold_of_its_drafter(seed):
    schedule = schedule_of(2, 3, 7)
    state, g = random_state(schedule, seed)
    thresholds = random_thresholds(state, [True, seed % 2 > 0, True], g)
    expected = copy.deepcopy(thresholds)
    state.draft_length.copy_(torch.randint(0, 8, (5,), generator=g))
    # Requests without a proposal, chunks of prompts, new requests in another one's slot.
    state.row_of_slot.copy_(torch.tensor([3, -1, 0, 1, 2, -1, 4]))
    num_sampled = torch.tensor([0, 1, 3, 1, 2, 8], dtype=torch.int32)
    given = {
        "index": torch.tensor([3, 0, 4, 2, 1, 6], dtype=torch.int32),
        "num_sampled": num_sampled,
        "num_rejected": torch.tensor([0, 0, 5, 7, 6, 0], dtype=torch.int32),
    }
    entropy_stopping.observe_target(thresholds, state, **given)
    step_reference.observe_target(expected, state, **given)
    assert_equal(thresholds, expected)
    thresholds.forget(torch.tensor([2, 4]))
    assert not thresholds.count[:, [2, 4]].any() and thresholds.count.any()
