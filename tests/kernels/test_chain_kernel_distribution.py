"""The kernels' distribution over many seeds, for a fixed draft, against the exact one."""

from unittest import mock

import pytest
import torch
from oracle import sequential
from oracle.exact import distribution_of
from support import vllm_sampler
from support.exact_joint_distribution import chi_square_p_value
from support.kernel_batches import verify_flat

V, K = 3, 3
REJECTED, KEPT = 1e-6, 1e-3


def make_draft():
    """Logits [K + 1, V] and [K, V] and a draft that can end anywhere: a = 1, .43, .29, .24."""
    target = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.6, 0.3, 0.1], [0.3, 0.4, 0.3]])
    draft = torch.tensor([[0.2, 0.7, 0.1], [0.3, 0.6, 0.1], [0.05, 0.35, 0.6]])
    return target.log(), draft.log(), torch.tensor([1, 0, 1])


def p_value(token_ids, num_accepted, verify) -> float:
    """Chi-square of (accepted, next token) pairs against what a plain rule makes of the draft."""
    target, draft, tokens = make_draft()
    rows = target.softmax(-1).tolist(), draft.softmax(-1).tolist()
    exact = distribution_of(lambda c: verify(*rows, tokens.tolist(), c.bernoulli, c.sample))
    accepted = num_accepted.tolist()
    outcomes = [(t, int(row[t])) for t, row in zip(accepted, token_ids, strict=True)]
    return chi_square_p_value(outcomes, {each: float(p) for each, p in exact.items()})


@pytest.mark.parametrize(
    ("method", "requests", "rejected"),
    [
        # Few requests tell other rules apart less clearly.
        ("block", 250, KEPT),
        pytest.param("block", 700, REJECTED, marks=pytest.mark.slow),
        pytest.param("standard", 150, REJECTED, marks=pytest.mark.slow),
    ],
)
def test_distribution_for_one_draft(method, requests, rejected):
    target, draft, tokens = make_draft()
    result = verify_flat(
        target_logits=target.repeat(requests, 1),
        draft_logits=draft.repeat(requests, 1),
        draft_token_ids=tokens.repeat(requests),
        cu_num_draft_tokens=torch.arange(requests + 1) * K,
        temperature=torch.ones(requests),
        seeds=torch.arange(requests) * 1000003,
        draws=torch.full((requests,), 5),
        max_draft_tokens=K,
        method=method,
    )
    found = result.token_ids, result.num_accepted
    assert p_value(*found, getattr(sequential, method)) > KEPT
    if method == "block":
        assert p_value(*found, sequential.standard) < rejected
        assert p_value(*found, plain_residual) < rejected


def plain_residual(*call):
    """A biased rule, with the residual (p - q)+ in place of (a * p - q)+."""
    right = sequential.residual
    with mock.patch.object(sequential, "residual", lambda a, p, q: right(1, p, q)):
        return sequential.block(*call)


@pytest.mark.slow
def test_vllm_draws_from_the_same_distribution():
    """Within one call vLLM's uniforms are independent (across calls those of 0.32 are not)."""
    try:
        rejection_sample, *_ = vllm_sampler.load_v2_sampler()
    except ImportError as error:
        pytest.skip(f"vLLM's sampler cannot be loaded: {error}")
    requests = 200
    target, draft, tokens = make_draft()
    rows = K + 1
    index = torch.arange(requests, dtype=torch.int32)
    sampled, num_sampled = rejection_sample(
        target.repeat(requests, 1),
        draft.repeat(requests, 1).view(requests, K, V),
        torch.cat((torch.zeros(1, dtype=torch.int64), tokens)).repeat(requests),
        torch.arange(requests + 1, dtype=torch.int32) * rows,
        torch.arange(rows).repeat(requests),
        index,
        index.repeat_interleave(rows),
        torch.arange(rows, dtype=torch.int32).repeat(requests),
        torch.ones(requests),
        torch.arange(requests) * 2654435761,
        K,
        use_block_verification=True,
    )
    assert p_value(sampled, num_sampled - 1, sequential.block) > KEPT
