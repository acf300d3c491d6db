"""Uniforms inside kernels equal those on the host, and so do verified tokens."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support.kernel_batches import make_chains
from support.kernel_reference import probabilities

from vllm_hsd.kernels import chain_verify
from vllm_hsd.kernels.rng import stream_of, uniform
from vllm_hsd.rules import uniforms
from vllm_hsd.rules.chain import verify_batch
from vllm_hsd.rules.inputs import ChainBatch
from vllm_hsd.rules.rng import host_uniforms


@triton.jit
def _uniform_kernel(out_ptr, seed_ptr, draw_ptr, stream, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    u = uniform(tl.load(seed_ptr), stream, tl.load(draw_ptr) + lane)
    tl.store(out_ptr + lane, u)


@pytest.mark.every_kernel
@pytest.mark.parametrize(("seed", "draw"), [(0, 0), (-1, 2**32 - 3), (2**62 + 12345, 2**45)])
def test_kernel_and_package_draw_the_same_uniforms(seed, draw):
    drawn = torch.full((8,), float("nan"), dtype=torch.float64)
    seeds, draws = torch.tensor([seed]), torch.tensor([draw])
    _uniform_kernel[(1,)](drawn, seeds, draws, stream_of(5), LANES=8)
    assert drawn.equal(uniforms(seeds, torch.tensor(5), draws + torch.arange(8)))


def test_level_zero_verifies_nothing():
    """Its stream belongs to the tokens that it drafts."""
    assert stream_of(0) == 0
    for level, lowest in ((-1, 0), (0, 1), (2**31, 0)):
        with pytest.raises(ValueError, match="level"):
            stream_of(level, lowest)


def host_verdict(batch, method: str, level: int, first: int):
    """Verification on the host, with a request's uniforms from its `first` draw on."""
    lengths = batch["cu_num_draft_tokens"].diff().numpy()
    size, numbers = len(lengths), [first + np.arange(n + 1) for n in lengths]
    seeds = np.repeat(batch["seeds"].numpy(), lengths + 1)
    drawn = host_uniforms(seeds, np.array(level), np.concatenate(numbers))
    owners = torch.arange(size).repeat_interleave(torch.from_numpy(lengths))
    rows = torch.arange(size).repeat_interleave(torch.from_numpy(lengths + 1))
    chain = ChainBatch.flat(
        probabilities(batch["target_logits"], batch["temperature"][rows]),
        probabilities(batch["draft_logits"], batch["temperature"][owners]),
        batch["draft_token_ids"].numpy(),
        lengths,
    )
    return verify_batch(chain, method, drawn)


@pytest.mark.parametrize("method", chain_verify.METHODS)
def test_equal_seeds_and_drafts_give_equal_verdicts_on_host_and_device(method):
    batch = make_chains(60, [3, 0, 5, 1, 4, 5], seed=7)
    batch["temperature"] = torch.linspace(0.6, 1.2, 6)
    batch["draws"] = torch.full((6,), 11)
    for level in (1, 3):
        result = chain_verify.verify_chain(**batch, method=method, level=level)
        tokens, accepted = host_verdict(batch, method, level, first=11)
        assert result.token_ids.tolist() == tokens.tolist()
        assert result.num_accepted.tolist() == accepted.tolist()
    # Another draw, another token: these uniforms really decide.
    other, _ = host_verdict(batch, method, 3, first=12)
    assert result.token_ids.tolist() != other.tolist()
