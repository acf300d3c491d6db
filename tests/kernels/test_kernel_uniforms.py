"""Uniforms inside kernels equal those on the host; `test_chain_kernels.py`: verified tokens too."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from vllm_hsd.kernels.rng import stream_of, uniform
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
    expected = host_uniforms(seeds.numpy(), np.int64(5), draws.numpy() + np.arange(8))
    assert (drawn.numpy() == expected).all()


def test_level_zero_verifies_nothing():
    """Its stream belongs to the tokens that it drafts."""
    assert stream_of(0) == 0
    for level, lowest in ((-1, 0), (0, 1), (2**31, 0)):
        with pytest.raises(ValueError, match="level"):
            stream_of(level, lowest)
