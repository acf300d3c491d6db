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
from torch.utils._pytree import tree_map_only

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
    """Every op of a proposal by kernel and, on the CPU, by reference; states must stay equal.

    Where `unverified`, levels pass on what is below.
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
    references = step_reference.steps([table.cpu() for table in kept])

    def both(name: str, *given, steps=cascade_steps, **options) -> None:
        """One step, by its kernel with all tensors on the device, and by its reference."""
        moved, named = tree_map_only(torch.Tensor, lambda t: t.to(device), (given, options))
        getattr(steps, name)(state, *moved, **named)
        getattr(references, name)(expected, *given, **options)
        assert_equal_states(state, expected)

    tensors = runner_tensors(seed, num_reqs, schedule.window)
    scales = torch.tensor([0.5, 1.0, 2.0][: schedule.num_levels])
    both("stage", schedule, **tensors, scales=scales)
    for at, op in enumerate(schedule.ops):
        if at == schedule.tail:
            both("begin_tail", schedule)
        if isinstance(op, Lookup):
            lengths = {"shortest": 1 + seed % 2, "longest": 3}
            both("lookup_ngram", tensors["text"], steps=lookups, **lengths)
            continue
        both("place", schedule, op, groups, MAX_MODEL_LEN, committed_too=seed % 2 == 0)
        count = batch * schedule.num_logits(op)
        logits = torch.randn(count, VOCABULARY, generator=g).bfloat16()
        if isinstance(op, Draft) or unverified:
            token = torch.randint(0, VOCABULARY, (batch,), generator=g)
            drawn = (logits[:batch], token, *torch.randn(2, batch, generator=g))
            if isinstance(op, Draft):
                both("commit_draft", op, *drawn)
            else:
                taken = expected.drafted[op.level - 1].clone()
                both("commit_unverified", op, *drawn, taken)
        else:
            result = random_result(op, expected, g)
            both("commit_verify", op, logits, result, torch.randn(count, generator=g))
    if schedule.horizontal_tokens:
        both("append_tail", schedule)
    both("collect", schedule)
    assert (state.draft_tokens >= 0).all() and (state.draft_tokens < VOCABULARY).all()
    assert (state.draft_length <= schedule.num_speculative_tokens).all()
    assert (state.draft_length > 0).any() == (num_reqs > 0)
    assert num_reqs > 0 or (state.slot_mapping == -1).all()
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
