"""The faults of `make gpu-proof`, on tables, with the host's verifier in place of the kernels."""

import pytest
import torch
from support.marks import slow

from benchmarks.gpu import pit
from benchmarks.gpu.faults import FAULTS, Step

VOCABULARY, BATCH, LENGTH, K = 64, 256, 256, 5


def block_verification(
    p: torch.Tensor, q: torch.Tensor, x: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted tokens [B] of drafts [B, K] and the next ones [B, 1]; `rules.chain` for a batch."""
    rho = p[:, :-1].gather(2, x[..., None]) / q.gather(2, x[..., None])
    a = torch.ones_like(p[..., :1])
    for t in range(x.shape[1]):
        a[:, t + 1] = (a[:, t] * rho[:, t]).clamp_max(1)
    rest = torch.cat(((a[:, :-1] * p[:, :-1] - q).clamp_min(0), p[:, -1:]), 1)
    mass = rest.sum(-1, keepdim=True)
    h = torch.where(a >= 1, 1.0, mass / (mass + 1 - a))
    h[:, -1], rest = a[:, -1], torch.where(mass > 0, rest, p)
    succeeds = uniforms[:, 1:] < h[:, 1:, 0]
    places = torch.arange(1, x.shape[1] + 1)
    accepted = torch.where(succeeds, places, 0).amax(1)
    cumulative = rest[torch.arange(len(x)), accepted].cumsum(1)
    goal = uniforms[:, :1] * cumulative[:, -1:]
    return accepted, torch.searchsorted(cumulative, goal, right=True).clamp_max(p.shape[2] - 1)


def p_value(fault: str | None, seed: int) -> float:
    """Of BATCH texts of LENGTH tokens."""
    g = torch.Generator().manual_seed(seed)
    target = torch.randn(VOCABULARY, 16, generator=g) @ torch.randn(16, VOCABULARY, generator=g) / 2
    drafter = target + 0.6 * torch.randn(VOCABULARY, VOCABULARY, generator=g)
    before, after = FAULTS[fault] if fault else (None, None)
    texts = torch.zeros(BATCH, LENGTH + K + 2, dtype=torch.int64)
    ends = torch.ones(BATCH, dtype=torch.int64)
    columns, every = torch.arange(K + 1), torch.arange(BATCH)
    while int(ends.min()) <= LENGTH:
        fed = texts[every, ends - 1][:, None]
        for _ in range(K):
            probs = drafter[fed[:, -1]].softmax(-1)
            fed = torch.cat((fed, torch.multinomial(probs, 1, generator=g)), 1)
        rows = drafter[fed[:, :-1]]
        lse, drafts = rows.logsumexp(-1), fed[:, 1:]
        drawn = rows.gather(2, drafts[..., None])[..., 0] - lse
        step = Step(target[fed], lse, drafts, drawn, fed, ends, g)
        if before:
            before(step)
        target_probs = step.logits.double().softmax(-1)
        draft_probs = (rows - step.lse[..., None]).double().exp()
        uniforms = torch.rand(BATCH, K + 1, dtype=torch.float64, generator=g)
        accepted, last = block_verification(target_probs, draft_probs, drafts, uniforms)
        step.token_ids = torch.cat((drafts, drafts[:, :1]), 1).scatter(1, accepted[:, None], last)
        step.num_emitted = accepted + 1
        if after:
            after(step)
        emitted = torch.where(ends <= LENGTH, step.num_emitted, 0)
        keep = columns < emitted[:, None]
        at = (ends[:, None] + columns).clamp_max(texts.shape[1] - 1)
        texts.scatter_(1, at, torch.where(keep, step.token_ids, texts.gather(1, at)))
        ends += emitted
    pairs = [(text[:-1], text[1:]) for text in texts[:, : LENGTH + 1]]
    return pit.p_value([pit.places(target[fed], own, drafter[fed]) for fed, own in pairs])


# Of the ratio, rows, the cap, recovered and bonus tokens others are tried.
SLOW = "acceptance ratio too small", "ratio too large at the second place"
SLOW += "drafts accepted unseen", "every draft accepted in one request of 16"


@pytest.mark.parametrize("fault", [*(name for name in FAULTS if name not in SLOW), *slow(*SLOW)])
def test_a_fault_is_found_with_65536_tokens(fault):
    assert p_value(fault, seed=0) < pit.REJECTED


@pytest.mark.parametrize("seed", [0, *slow(range(1, 20))])
def test_sound_samplers_pass(seed):
    assert p_value(None, seed) > pit.PASSES
