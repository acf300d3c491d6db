"""Rows of logits with NaN or infinities, against the op that plain vLLM samples with on a CPU."""

import pytest
import torch

from vllm_hsd.runner_v1.sampling import _argmax_sampled

NAN, INF = torch.nan, torch.inf
SEEDS = 4000


def plain_tokens(row: list[float]) -> torch.Tensor:
    """[SEEDS] int64 tokens of vLLM's own CPU sampler."""
    import vllm._custom_ops  # noqa: F401  (registers the op)

    logits = torch.tensor([row]).repeat(SEEDS, 1)
    return torch.ops._C.fused_gumbel_argmax(logits, torch.arange(SEEDS))


@pytest.mark.parametrize(
    "row",
    [
        [0.0, INF, 1.0, 2.0],
        [0.0, INF, 1.0, INF],
        [1.0, NAN, INF, INF],
        [NAN, 0.0, INF, 1.0],
        [NAN, 0.0, 2.0, 1.0],
        [NAN, NAN, NAN, NAN],
        [-INF, -INF, -INF, -INF],
    ],
)
def test_certain_rows_give_the_token_of_plain_vllm(row):
    expected = plain_tokens(row).unique()
    assert len(expected) == 1
    probs = _argmax_sampled(torch.tensor([row]))[0]
    assert probs.tolist() == [float(v == expected[0]) for v in range(4)]


@pytest.mark.parametrize("row", [[1.0, 0.0, NAN, -INF], [2.0, NAN, NAN, 1.0], [0.5, 1.0, NAN, 0.0]])
def test_nan_is_passed_over_as_in_plain_vllm(row):
    """Deviations above five standard errors have a chance below 1e-6 each."""
    probs = _argmax_sampled(torch.tensor([row]))[0].double()
    found = torch.bincount(plain_tokens(row), minlength=4) / SEEDS
    assert ((found - probs).abs() <= 5 * (probs * (1 - probs) / SEEDS).sqrt() + 1e-9).all()
