"""Verification of filtered drafts, by exact distributions."""

import itertools

import pytest
import torch
from oracle.distributions import chain_distribution
from support import kernel_reference as reference

from vllm_hsd.kernels.filter_rows import Filters

V = 4
FILTERS = [(2, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.4), (3, 0.8, 0.1)]


def rows(number: int, seed: int, filters, filtered: bool = True) -> torch.Tensor:
    """Distributions of `number` rows at temperature .8, as the twin of the kernels filters them."""
    logits = torch.randn(number, V, generator=torch.Generator().manual_seed(seed)) * 1.5
    temperature = torch.full((number,), 0.8)
    if filtered:
        k, p, m = filters
        given = Filters(
            torch.full((number,), k), torch.full((number,), p), torch.full((number,), m)
        )
        thresholds = reference.row_thresholds(logits, temperature, given)
        logits = reference.filtered(logits, temperature, thresholds)
    return reference.probabilities(logits, temperature)


def bias(target, drawn, verified, method: str) -> float:
    """Total variation of two tokens from the target's, drawn from one kind of rows, verified by
    another."""
    found = torch.zeros(V, V, dtype=torch.float64)
    for x, y in itertools.product(range(V), repeat=2):
        outcome = chain_distribution(target, verified, torch.tensor([x, y]), method=method)
        weight = drawn[0, x] * drawn[1, y]
        # The next call draws the second token exactly where this one emitted one only.
        found += weight * outcome[0][:, None] * target[1]
        found[x] += weight * outcome[1]
        found[x, y] += weight * outcome[2].sum()
    return float((found - target[0][:, None] * target[1]).abs().sum() / 2)


@pytest.mark.parametrize("method", ["block", "standard"])
@pytest.mark.parametrize("filters", FILTERS)
def test_filtered_drafts_are_verified_against_filtered_rows(filters, method):
    worst = 0.0
    for seed in range(10):
        target = rows(3, seed, filters)
        drawn, whole = (rows(2, 100 + seed, filters, filtered) for filtered in (True, False))
        assert bias(target, drawn, drawn, method) < 1e-12
        # Drafts of another filter, or of none, are as lossless: it is their own rows that count.
        assert bias(target, whole, whole, method) < 1e-12
        worst = max(worst, bias(target, drawn, whole, method))
    # Negative control: drawn from the filtered rows, verified against the whole ones.
    assert worst > 1e-2
