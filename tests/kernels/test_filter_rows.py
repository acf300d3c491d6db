"""Thresholds of filtered rows: the kernels against the reference, that against vLLM."""

import pytest
import torch
from support.interpreter import count_bytes
from support.kernel_batches import UNUSABLE_ROWS

from vllm_hsd.kernels import blocks, filter_rows
from vllm_hsd.kernels import naive as reference
from vllm_hsd.kernels.filter_rows import Filters, row_thresholds

INF = float("inf")
CHUNK_AND_BLOCK = 128, 64


def batch(vocab_size, dtype=torch.float32, rows=40, seed=0):
    """(logits, temperature, filters) of requests with every combination of filters."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=g) * 3
    logits[1, vocab_size // 3 :] = -INF  # as a grammar leaves it
    logits[2] = 0.5
    number = torch.arange(rows)
    top_k = torch.randint(1, vocab_size + 1, (rows,), generator=g)
    top_k = torch.where(torch.rand(rows, generator=g) < 0.5, top_k.clamp(max=20), top_k)
    top_k = torch.where(number % 2 == 0, 0, top_k).int()
    top_p = torch.where(number % 4 < 2, 1.0, torch.rand(rows, generator=g) * 0.999 + 0.001)
    min_p = torch.where(number % 8 < 4, 0.0, torch.rand(rows, generator=g) ** 3)
    temperature = torch.rand(rows, generator=g) + 0.3
    temperature[5::9] *= -1  # coupled
    temperature[7::20] = 0
    return logits.to(dtype), temperature, Filters(top_k, top_p, min_p)


@pytest.mark.every_kernel
@pytest.mark.parametrize("candidates", [4096, 8], ids=["gathered", "whole rows"])
@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, torch.float32), (31, torch.bfloat16), (700, torch.float32)]
)
def test_matches_reference(vocab_size, dtype, candidates, small_blocks, monkeypatch):
    """Also with more entries above the bound than are gathered."""
    monkeypatch.setattr(filter_rows, "CANDIDATES", candidates)
    logits, temperature, filters = batch(vocab_size, dtype)
    found = row_thresholds(logits, temperature, filters)
    expected = reference.row_thresholds(logits, temperature, filters)
    # Where fewer are possible than top-k keeps, -inf is a threshold as good.
    both = found.isfinite()
    torch.testing.assert_close(found[both], expected[both], rtol=1e-6, atol=1e-6)
    kept = reference.filtered(logits, temperature, found)
    assert kept.equal(reference.filtered(logits, temperature, expected))


def flat(rows: int, vocab_size: int) -> torch.Tensor:
    """Normal logits [rows, V] of which most are above the bound of a top-p."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab_size, generator=g) * 2.4
    logits[:, :20] = 11 - torch.arange(20) * 0.35
    return logits


def test_the_weight_of_top_p_is_not_that_of_a_rounded_logsumexp(small_blocks):
    """At a low temperature, where that is rounded by 1e-4."""
    logits = torch.full((2, 700), -50.0)
    logits[:, :2] = torch.tensor([[121.0, 120.5], [40.0, 39.91]])
    p = torch.tensor([1 - 2**-24, 0.99985])
    filters = Filters(torch.zeros(2, dtype=torch.int32), p, torch.zeros(2))
    temperature = torch.tensor([0.05, 0.01])
    kept = reference.filtered(logits, temperature, row_thresholds(logits, temperature, filters))
    assert kept.isfinite().sum(1).tolist() == [2, 1]


@pytest.mark.parametrize("sampled", [4, 1024], ids=["one in four", "one in 1024"])
def test_flat_rows_have_the_references_threshold(sampled, monkeypatch):
    """More entries are above the bound than are gathered; three entries tell nothing of a row."""
    monkeypatch.setattr(blocks, "CHUNK", 1024)
    monkeypatch.setattr(blocks, "BLOCK", 1024)
    monkeypatch.setattr(filter_rows, "CANDIDATES", 256)
    monkeypatch.setattr(filter_rows, "SAMPLED", sampled)
    rows, one = 4, torch.ones(4)
    p = torch.tensor([0.5, 0.8, 0.95, 0.999])
    filters = Filters(torch.zeros(rows, dtype=torch.int32), p, 0 * one)
    # Without ties, with some and with nothing else.
    for logits in (flat(rows, 3000), flat(rows, 3000).bfloat16().float(), torch.zeros(rows, 3000)):
        expected = reference.row_thresholds(logits, one, filters)
        torch.testing.assert_close(
            row_thresholds(logits, one, filters), expected, rtol=1e-6, atol=1e-6
        )


@pytest.mark.interpreted
def test_few_loads_of_a_flat_row_depend_on_each_other():
    """Those of the program that ends last: the others of its row are done by then."""
    logits, one = flat(1, 151936).bfloat16(), torch.ones(1)
    filters = Filters(torch.zeros(1, dtype=torch.int32), one * 0.95, 0 * one)
    with count_bytes() as counts:
        threshold = row_thresholds(logits, one, filters)
    assert threshold.equal(reference.row_thresholds(logits, one, filters))
    assert int((logits[0] >= threshold[0]).sum()) > filter_rows.CANDIDATES
    assert counts["most loads"] < 120


def test_a_whole_vocabulary_and_rows_of_requests():
    logits, temperature, filters = batch(32000, torch.bfloat16, rows=10, seed=3)
    filters.top_p[:] = 0.9
    expected = reference.row_thresholds(logits, temperature, filters)
    assert row_thresholds(logits, temperature, filters).equal(expected)
    order = torch.tensor([4, -1, 0, 0])
    by_index = row_thresholds(logits[order], temperature, filters, index=order)
    assert by_index.tolist() == [float(expected[4]), -INF, *expected[[0, 0]].tolist()]
    pairs = logits.repeat_interleave(2, 0)
    by_request = row_thresholds(pairs, temperature, filters, rows_per_request=2)
    assert by_request.equal(expected.repeat_interleave(2))


@pytest.mark.parametrize("kind", list(UNUSABLE_ROWS))
def test_an_invalid_row_is_not_filtered(kind, small_blocks):
    logits, one = torch.randn(4, 700), torch.ones(4)
    UNUSABLE_ROWS[kind](logits)
    filters = Filters(torch.tensor([5, 0, 0, 5]).int(), one * 0.5, torch.tensor([0.0, 0.1, 0, 0.1]))
    assert row_thresholds(logits, one, filters).tolist() == [-INF] * 4


def test_the_reference_is_vllms_filter():
    """min-p, then top-k, then top-p, at least one token; ties at a threshold are all kept."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    for seed in range(20):
        logits, temperature, (top_k, top_p, min_p) = batch(300, seed=seed)
        logits[2] = torch.randn(300)
        found = reference.filtered(
            logits,
            temperature,
            reference.row_thresholds(logits, temperature, (top_k, top_p, min_p)),
        )
        scaled = reference.scaled_logits(logits, temperature.abs())
        floor = scaled.amax(1) + min_p.log()
        expected = scaled.masked_fill(scaled < floor[:, None], -INF)
        k = torch.where((top_k > 0) & (top_k < 300), top_k, 300)
        expected = apply_top_k_top_p_pytorch(expected, k, top_p)
        sampled = temperature != 0
        assert expected.isfinite()[sampled].equal(found.isfinite()[sampled])
    ties = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]])
    one = torch.ones(1)
    for k, p, kept in ((2, 1.0, 4), (1, 1.0, 1), (0, 0.5, 4), (0, 0.3, 1), (3, 1e-6, 1)):
        filters = Filters(torch.tensor([k]).int(), one * p, one * 0)
        assert int((ties >= reference.row_thresholds(ties, one, filters)).sum()) == kept
        if p == 1:
            stock = apply_top_k_top_p_pytorch(ties.clone(), torch.tensor([k]), None)
            assert int(stock.isfinite().sum()) == kept


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 4, dtype=torch.float64)}, "logits must be bfloat16"),
        ({"index": torch.zeros(2, dtype=torch.int64)}, r"index must have shape \[3\]"),
        ({"logits": torch.zeros(4, 4)}, "more than 1 for each of 3 requests"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    names = "logits", "temperature", "filters"
    arguments = dict(zip(names, batch(4, rows=3), strict=True))
    with pytest.raises(ValueError, match=message):
        row_thresholds(**arguments | change)
