"""Random proposals, op by op: every kernel against its reference, on any device."""

import torch
from support import step_reference
from support.proposal_states import (
    GUARD,
    MAX_MODEL_LEN,
    VOCABULARY,
    GuardedState,
    assert_equal_states,
    block_tables,
    copied,
    runner_tensors,
)

from vllm_hsd.cascade import cascade_steps, lookups
from vllm_hsd.cascade.schedule import Draft, Lookup, Verify
from vllm_hsd.kernels import chain_verify


def walk(
    schedule,
    seed: int,
    batch: int,
    num_reqs: int,
    lookup: bool,
    device: str = "cpu",
    unverified: bool = False,
) -> None:
    """Every op of a proposal by kernel and by reference, on states that must stay equal.

    Args:
        unverified: levels pass on what is below.
        device: of the kernels; the references run on the CPU.
    """
    g = torch.Generator().manual_seed(seed)
    guarded = GuardedState(schedule, batch, lookup, device=device)
    state = guarded.state
    expected = copied(state)
    # Left over from another proposal.
    for name in ("window", "end", "start", "drafted", "requested", "base", "limit", "origin"):
        left_over = getattr(expected, name).random_(0, 9, generator=g)
        getattr(state, name).copy_(left_over)
    # `groups` holds addresses of the tables, which must live as long.
    groups, kept = block_tables(seed, device=device)
    tables = [table.cpu() for table in kept]
    tensors = runner_tensors(seed, num_reqs, schedule.window)
    tensors["scales"] = torch.tensor([0.5, 1.0, 2.0][: schedule.num_levels])
    theirs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}
    cascade_steps.stage(state, schedule, **theirs)
    step_reference.stage(expected, schedule, **tensors)
    assert_equal_states(state, expected)
    for at, op in enumerate(schedule.ops):
        if at == schedule.tail:
            cascade_steps.begin_tail(state, schedule)
            step_reference.begin_tail(expected, schedule)
            assert_equal_states(state, expected)
        if isinstance(op, Lookup):
            step = {"shortest": 1 + seed % 2, "longest": 3}
            lookups.lookup_ngram(state, theirs["text"], **step)
            step_reference.lookup_ngram(expected, tensors["text"], **step)
            assert_equal_states(state, expected)
            continue
        shared = seed % 2 == 0
        cascade_steps.place(state, schedule, op, groups, MAX_MODEL_LEN, committed_too=shared)
        step_reference.place(
            expected, schedule, op, groups, MAX_MODEL_LEN, committed_too=shared, tables=tables
        )
        assert_equal_states(state, expected)
        count = batch * schedule.num_logits(op)
        logits = torch.randn(count, VOCABULARY, generator=g).bfloat16()
        if isinstance(op, Draft) or unverified:
            taken = state.drafted[op.level - 1].clone()
            on = () if isinstance(op, Draft) else (taken,)
            name = "commit_unverified" if on else "commit_draft"
            logits = logits[:batch]
            token = torch.randint(0, VOCABULARY, (batch,), generator=g)
            drawn = (logits, token, *torch.randn(2, batch, generator=g))
            given = (tensor.to(device) for tensor in drawn)
            getattr(cascade_steps, name)(state, op, *given, *on)
            getattr(step_reference, name)(expected, op, *drawn, *(each.cpu() for each in on))
        else:
            result, thresholds = random_result(op, expected, g), torch.randn(count, generator=g)
            on_device = chain_verify.ChainResult(*(tensor.to(device) for tensor in result))
            cascade_steps.commit_verify(
                state, op, logits.to(device), on_device, thresholds.to(device)
            )
            step_reference.commit_verify(expected, op, logits, result, thresholds)
        assert_equal_states(state, expected)
    if schedule.horizontal_tokens:
        cascade_steps.append_tail(state, schedule)
        step_reference.append_tail(expected, schedule)
        assert_equal_states(state, expected)
    cascade_steps.collect(state, schedule)
    step_reference.collect(expected, schedule)
    assert_equal_states(state, expected)
    assert (state.draft_tokens >= 0).all() and (state.draft_tokens < VOCABULARY).all()
    assert (state.draft_length <= schedule.num_speculative_tokens).all()
    assert (state.draft_length > 0).any()
    guarded.assert_guards()


def random_result(op: Verify, state, g) -> chain_verify.ChainResult:
    """Any acceptance of the drafts, invalid rows included; nonsense where there is no room."""
    accepted = torch.zeros(state.batch, dtype=torch.int32)
    emitted = accepted.clone()
    width = op.draft_length + 1
    tokens = torch.randint(0, VOCABULARY, (state.batch, width), generator=g)
    for b in range(state.batch):
        if state.origin[b] < 0:
            emitted[b], tokens[b] = GUARD, GUARD
            continue
        accepted[b] = torch.randint(0, int(state.drafted[op.level - 1, b]) + 1, (), generator=g)
        # An invalid row after an accepted token.
        emitted[b] = accepted[b] + int(accepted[b] == 0 or torch.rand((), generator=g) < 0.9)
    lse = torch.randn(state.batch, width, generator=g)
    lse[torch.rand(state.batch, width, generator=g) < 0.05] = float("nan")
    return chain_verify.ChainResult(tokens, accepted, emitted, lse)
