"""The faults of `make gpu-proof`, on tables, with the host's verifier in place of the kernels."""

import numpy as np
import pytest
import torch
from support.marks import slow

from benchmarks.gpu import pit
from benchmarks.gpu.faults import FAULTS, Step
from vllm_hsd.rules.chain import verify_batch
from vllm_hsd.rules.inputs import ChainBatch

VOCABULARY, BATCH, LENGTH, K = 64, 256, 256, 5


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
        batch = ChainBatch.flat(
            step.logits.double().softmax(-1).flatten(0, 1),
            (rows - step.lse[..., None]).double().exp().flatten(0, 1),
            drafts.flatten().numpy(),
            np.full(BATCH, K),
        )
        uniforms = torch.rand(BATCH * (K + 1), dtype=torch.float64, generator=g).numpy()
        token_ids, accepted = verify_batch(batch, "block", uniforms)
        step.token_ids = torch.from_numpy(token_ids)
        step.num_emitted = torch.from_numpy(accepted + 1)
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
