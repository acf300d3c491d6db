"""Noise by position is what vLLM's samplers take from a request's generator, in the same order."""

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, random_sample

from vllm_hsd.runner_v1.noise import RequestNoise, skip_of

V, TOKENS = 50, 40
LOGITS = torch.randn(TOKENS, V, generator=torch.Generator().manual_seed(1))
SEEDS = (7, 8)


def sampler_of(kind: str) -> TopKTopPSampler:
    current_platform.import_kernels()
    sampler = TopKTopPSampler(use_fp64_gumbel=kind.endswith("float64"))
    if kind.startswith("native"):  # as on CUDA
        sampler.forward = sampler.forward_native
    return sampler


def draw(sampler: TopKTopPSampler, rows: torch.Tensor, generators: list) -> list[int]:
    tokens, _ = sampler(rows.clone(), dict(enumerate(generators)), None, None)
    return tokens.tolist()


@pytest.mark.parametrize("kind", ["cpu", "cpu, float64", "native", "native, float64"])
def test_tokens_are_those_of_one_draw_for_each_token(kind):
    sampler = sampler_of(kind)
    plain = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    expected = [draw(sampler, row.expand(2, -1), plain) for row in LOGITS]
    if kind == "native":
        generators = {i: torch.Generator().manual_seed(seed) for i, seed in enumerate(SEEDS)}
        first = LOGITS[0].softmax(-1).expand(2, -1).clone()
        assert random_sample(first, generators).tolist() == expected[0]
    for i, seed in enumerate(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        noise, done = RequestNoise(generator, skip_of(sampler, V)), 0
        while done < TOKENS:
            # A drafter looks ahead, in any order, and the target takes what it emits.
            for offset in (2, 0, 1):
                if done + offset < TOKENS:
                    row = LOGITS[done + offset : done + offset + 1]
                    token = draw(sampler, row, [noise.at(offset)])
                    assert token == [expected[done + offset][i]]
            emitted = 1 + done % 4
            noise.emitted(emitted)
            done += emitted
        # Where vLLM's own sampler would go on, it goes on with the same noise.
        moved = torch.Generator().manual_seed(seed)
        for _ in range(done):
            draw(sampler, LOGITS[:1], [moved])
        assert torch.equal(moved.get_state(), generator.get_state())
