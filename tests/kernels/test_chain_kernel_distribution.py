"""The kernels' distribution over many seeds, for a fixed draft, against the exact one."""

import pytest
import torch
from oracle.distributions import chain_distribution
from scipy import stats
from support import vllm_sampler
from support.kernel_batches import verify_flat

V, K = 3, 3
REJECTED, KEPT = 1e-6, 1e-3


def make_draft():
    """Logits [K + 1, V] and [K, V] and a draft that can end anywhere: a = 1, .43, .29, .24."""
    target = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.6, 0.3, 0.1], [0.3, 0.4, 0.3]])
    draft = torch.tensor([[0.2, 0.7, 0.1], [0.3, 0.6, 0.1], [0.05, 0.35, 0.6]])
    return target.log(), draft.log(), torch.tensor([1, 0, 1])


def p_value(outcomes, distribution):
    """Chi-square of (accepted, next token) pairs against an exact distribution [K + 1, V]."""
    counts = torch.zeros(distribution.shape, dtype=torch.float64)
    for t, v in outcomes:
        counts[t, v] += 1
    possible = distribution > 1e-12
    if counts[~possible].sum() > 0:
        return 0.0
    expected = distribution[possible] / distribution[possible].sum() * len(outcomes)
    return stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue


def outcomes_of(token_ids, num_accepted):
    accepted = num_accepted.tolist()
    return [(t, int(row[t])) for t, row in zip(accepted, token_ids, strict=True)]


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
    outcomes = outcomes_of(result.token_ids, result.num_accepted)
    p, q = target.softmax(-1), draft.softmax(-1)
    assert p_value(outcomes, chain_distribution(p, q, tokens, method=method)) > KEPT
    if method == "block":
        assert p_value(outcomes, chain_distribution(p, q, tokens, method="standard")) < rejected
        assert p_value(outcomes, plain_residual_distribution(p, q, tokens)) < rejected


def plain_residual_distribution(p, q, tokens):
    """That of a biased rule, with the residual (p - q)+ in place of (a * p - q)+."""
    a = [1.0]
    for t, x in enumerate(tokens.tolist()):
        a.append(min(1.0, a[-1] * float(p[t, x] / q[t, x])))
    rows = torch.cat(((p[:K] - q).clamp_min(0), p[K:])).double()
    mass = rows.sum(1)
    h = torch.tensor(
        [1.0, *(float(s / (s + 1 - r)) for s, r in zip(mass[1:K], a[1:K], strict=True))]
    )
    h = torch.cat((h, torch.tensor(a[-1:])))
    later_fail = torch.cat(((1 - h[1:]).flip(0).cumprod(0).flip(0), torch.ones(1)))
    return (h * later_fail)[:, None] * rows / mass[:, None]


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
    expected = chain_distribution(target.softmax(-1), draft.softmax(-1), tokens, method="block")
    assert p_value(outcomes_of(sampled, num_sampled - 1), expected) > KEPT
