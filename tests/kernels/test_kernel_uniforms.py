"""Uniforms inside kernels equal those of `vllm_hsd.verify.uniforms`."""

import pytest
import torch
import triton
import triton.language as tl

from vllm_hsd.kernels.rng import ACCEPT, DRAFT, NEXT, stream_id, uniform
from vllm_hsd.verify import uniforms


@triton.jit
def _uniform_kernel(out_ptr, seed_ptr, draw_ptr, stream, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    u = uniform(tl.load(seed_ptr), stream, tl.load(draw_ptr) + lane)
    tl.store(out_ptr + lane, u)


@pytest.mark.interpret
@pytest.mark.parametrize(("seed", "draw"), [(0, 0), (-1, 2**32 - 3), (2**62 + 12345, 2**45)])
def test_kernel_and_package_draw_the_same_uniforms(seed, draw):
    drawn = torch.full((8,), float("nan"), dtype=torch.float64)
    stream = stream_id(5, NEXT)
    seeds, draws = torch.tensor([seed]), torch.tensor([draw])
    _uniform_kernel[(1,)](drawn, seeds, draws, stream, LANES=8)
    assert drawn.equal(uniforms(seeds, torch.tensor(stream), draws + torch.arange(8)))


def test_streams_differ():
    streams = {stream_id(level, p) for level in range(4) for p in (DRAFT, ACCEPT, NEXT)}
    assert len(streams) == 12
    with pytest.raises(ValueError, match="level"):
        stream_id(-1, ACCEPT)
