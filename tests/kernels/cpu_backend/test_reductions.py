"""Reductions and scans of the CPU backend against NumPy and torch."""

import math
from itertools import product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def reduce_kernel(
    x_ptr, out_ptr, index_ptr, n, M: tl.constexpr, K: tl.constexpr, AXIS: tl.constexpr
):
    """Sums, maxima, minima, and for integers exclusive ors; places of the extremes."""
    i, j = tl.arange(0, M)[:, None], tl.arange(0, K)[None, :]
    x = tl.load(x_ptr + i * K + j, mask=(j < n) & (i < 100), other=0)
    L: tl.constexpr = K if AXIS == 0 else M
    at = tl.arange(0, L)
    tl.store(out_ptr + at, tl.sum(x, axis=AXIS))
    most, place = tl.max(x, axis=AXIS, return_indices=True)
    tl.store(out_ptr + L + at, most)
    tl.store(index_ptr + at, place)
    least, place = tl.min(x, axis=AXIS, return_indices=True)
    tl.store(out_ptr + 2 * L + at, least)
    tl.store(index_ptr + L + at, place)
    tl.store(out_ptr + 3 * L + at, tl.max(x, axis=AXIS))
    tl.store(out_ptr + 4 * L + at, tl.min(x, axis=AXIS))
    if x.dtype.is_int():
        tl.store(out_ptr + 5 * L + at, tl.xor_sum(x, axis=AXIS))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(((4, 64), dtype) for dtype in (torch.int64, torch.float64, torch.bfloat16)),
        *product([(4, 64), (16, 1), (1, 256)], [torch.float32, torch.int32]),
    ],
)
def test_reductions(shape, dtype, axis):
    torch.manual_seed(2)
    rows, columns = shape
    x = (torch.randn(rows, columns) * 20).to(dtype)
    n = max(columns - 3, 1)
    out = torch.zeros(6, columns if axis == 0 else rows, dtype=dtype)
    places = torch.zeros(2, out.shape[1], dtype=torch.int32)
    reduce_kernel[(1,)](x, out, places, n, M=rows, K=columns, AXIS=axis)
    x[:, n:] = 0
    a = x.double().numpy() if dtype.is_floating_point else x.numpy()
    wanted = [a.sum(axis), a.max(axis), a.min(axis), a.max(axis), a.min(axis)]
    if not dtype.is_floating_point:
        wanted.append(np.bitwise_xor.reduce(a, axis))
    for found, each in zip(out, wanted, strict=False):
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
        each = torch.from_numpy(np.asarray(each)).to(dtype)
        torch.testing.assert_close(found, each, rtol=tolerance, atol=1e-5)
    assert np.array_equal(places.numpy(), [a.argmax(axis), a.argmin(axis)])


def test_extremes_ignore_nan_unless_all_are():
    x = torch.randn(4, 64)
    x[0, 3] = math.nan
    x[1] = math.nan
    x[2] = -math.inf
    results, places = torch.zeros(6, 4), torch.zeros(2, 4, dtype=torch.int32)
    reduce_kernel[(1,)](x, results, places, 64, M=4, K=64, AXIS=1)
    out = results[3:5]
    assert out[0, 0] == x[0].nan_to_num(-9).max() and out[1, 0] == x[0].nan_to_num(9).min()
    assert out[:, 1].isnan().all() and (out[:, 2] == -math.inf).all()


@triton.jit
def later_maximum(a, i, b, j):
    take = (b > a) | ((b == a) & (j > i))
    return tl.where(take, b, a), tl.where(take, j, i)


@triton.jit
def scan_kernel(
    x_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr
):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, K)[None, :]
    at = i * K + j
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.cumsum(x, axis=AXIS, reverse=REVERSE))
    most, _ = tl.associative_scan((x, at), axis=AXIS, combine_fn=later_maximum, reverse=REVERSE)
    tl.store(out_ptr + M * K + at, most)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(4, 64), (1, 128)])
def test_scans(axis, reverse, shape):
    x = torch.randn(shape)
    out = torch.zeros(2, *shape)
    scan_kernel[(1,)](x, out, M=shape[0], K=shape[1], AXIS=axis, REVERSE=reverse)
    y = x.flip(axis) if reverse else x
    wanted = torch.stack([y.cumsum(axis), y.cummax(axis)[0]])
    if reverse:
        wanted = wanted.flip(axis + 1)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


@triton.jit
def swap_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """A scan of several values: the second of a pair depends on the first's old value."""
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    a, b = tl.associative_scan((x, x * 0.5), axis=0, combine_fn=affine)
    tl.store(out_ptr + i, a)
    tl.store(out_ptr + BLOCK + i, b)


@triton.jit
def affine(a, b, c, d):
    return a * c, b * c + d


def test_a_scan_of_affine_maps():
    x = torch.rand(64) + 0.5
    out = torch.zeros(2, 64)
    swap_kernel[(1,)](x, out, BLOCK=64)
    a, b = 1.0, 0.0
    for k, factor in enumerate(x.tolist()):
        a, b = (factor, factor * 0.5) if k == 0 else (a * factor, b * factor + factor * 0.5)
        torch.testing.assert_close(out[:, k], torch.tensor([a, b]), rtol=1e-4, atol=1e-6)
