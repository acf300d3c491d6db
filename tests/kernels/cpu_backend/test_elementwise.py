"""Elementwise operations of the CPU backend against NumPy and torch."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

N = 256
SPECIAL = [
    0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, 1e-40, 3e38, -1e-45, 88.5, 89, -103, -87.5,
    127.9, -149.2,
]  # fmt: skip
FLOATS = [
    "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil", "abs", "erf",
    "sigmoid", "log1p", "neg",
]  # fmt: skip


@triton.jit
def float_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Rows of results, in the order of FLOATS."""
    i = tl.arange(0, BLOCK)
    m = i < n
    x = tl.load(x_ptr + i, mask=m, other=1.0)
    tl.store(y_ptr + i, tl.exp(x), mask=m)
    tl.store(y_ptr + n + i, tl.exp2(x), mask=m)
    tl.store(y_ptr + 2 * n + i, tl.log(x), mask=m)
    tl.store(y_ptr + 3 * n + i, tl.log2(x), mask=m)
    tl.store(y_ptr + 4 * n + i, tl.sqrt(x), mask=m)
    tl.store(y_ptr + 5 * n + i, tl.rsqrt(x), mask=m)
    tl.store(y_ptr + 6 * n + i, tl.sin(x), mask=m)
    tl.store(y_ptr + 7 * n + i, tl.cos(x), mask=m)
    tl.store(y_ptr + 8 * n + i, tl.floor(x), mask=m)
    tl.store(y_ptr + 9 * n + i, tl.ceil(x), mask=m)
    tl.store(y_ptr + 10 * n + i, tl.abs(x), mask=m)
    tl.store(y_ptr + 11 * n + i, tl.erf(x), mask=m)
    tl.store(y_ptr + 12 * n + i, tl.sigmoid(x), mask=m)
    tl.store(y_ptr + 13 * n + i, libdevice.log1p(x), mask=m)
    tl.store(y_ptr + 14 * n + i, -x, mask=m)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "least"), [(torch.float32, 4e-7, 1e-44), (torch.float64, 1e-14, 0.0)]
)
def test_functions_of_floats(dtype, tolerance, least):
    torch.manual_seed(0)
    x = torch.cat([torch.tensor(SPECIAL), torch.randn(100) * 10, torch.rand(100)]).to(dtype)
    y = torch.zeros(len(FLOATS), len(x), dtype=dtype)
    float_kernel[(1,)](x, y, len(x), BLOCK=N)
    for name, found in zip(FLOATS, y, strict=True):
        wide = name not in ("sin", "cos")
        wanted = getattr(torch, name)(x.double() if wide else x).to(dtype)
        torch.testing.assert_close(
            found, wanted, rtol=tolerance, atol=least, equal_nan=True, msg=lambda m, n=name: n + m
        )


@triton.jit
def exp_log_kernel(x_ptr, exp_ptr, log_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(exp_ptr + i, tl.exp(x))
    tl.store(log_ptr + i, tl.log(tl.abs(x)))


def test_exp_and_log_are_within_two_units_of_the_last_place():
    x = torch.linspace(-100, 88, 1 << 14)
    y, z = torch.zeros_like(x), torch.zeros_like(x)
    exp_log_kernel[(1,)](x, y, z, BLOCK=1 << 14)
    for found, wanted in ((y, x.double().exp()), (z, x.double().abs().log())):
        size = wanted.float().abs()
        unit = torch.nextafter(size, torch.tensor(math.inf)).double() - size.double()
        assert ((found.double() - wanted).abs() / unit).max() < 2


@triton.jit
def narrow_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, x * y + x)
    tl.store(out_ptr + BLOCK + i, tl.maximum(x, y))
    tl.store(out_ptr + 2 * BLOCK + i, tl.abs(x) - y)
    tl.store(out_ptr + 3 * BLOCK + i, tl.where(x > y, -x, y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats_are_rounded_after_every_operation(dtype):
    torch.manual_seed(1)
    x, y = (torch.randn(N).mul(30).to(dtype) for _ in range(2))
    out = torch.zeros(4, N, dtype=dtype)
    narrow_kernel[(1,)](x, y, out, BLOCK=N)
    wanted = [x * y + x, torch.maximum(x, y), x.abs() - y, torch.where(x > y, -x, y)]
    assert torch.equal(out, torch.stack(wanted))


@triton.jit
def int_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + BLOCK + i, x * y)
    tl.store(out_ptr + 2 * BLOCK + i, x // y)
    tl.store(out_ptr + 3 * BLOCK + i, x % y)
    tl.store(out_ptr + 4 * BLOCK + i, x & y)
    tl.store(out_ptr + 5 * BLOCK + i, x | y)
    tl.store(out_ptr + 6 * BLOCK + i, x ^ y)
    tl.store(out_ptr + 7 * BLOCK + i, x << (y & 7))
    tl.store(out_ptr + 8 * BLOCK + i, x >> (y & 7))
    tl.store(out_ptr + 9 * BLOCK + i, (x < y).to(x.dtype))
    tl.store(out_ptr + 10 * BLOCK + i, tl.minimum(x, y))
    tl.store(out_ptr + 11 * BLOCK + i, tl.maximum(x, y))
    tl.store(out_ptr + 12 * BLOCK + i, ~x)


@pytest.mark.parametrize(
    "dtype", [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
def test_integers(dtype):
    rng, info = np.random.default_rng(0), np.iinfo(dtype)
    x, y = (rng.integers(info.min, info.max, N, dtype=dtype, endpoint=True) for _ in range(2))
    y[:20] = rng.integers(1, 5, 20)
    y[y == 0] = 1
    if info.min < 0:
        y[y == -1] = 3
    out = torch.zeros(13, N, dtype=getattr(torch, dtype))
    int_kernel[(1,)](torch.from_numpy(x), torch.from_numpy(y), out, BLOCK=N)
    # A quotient is rounded toward zero.
    rest = np.fmod(x, y)
    wanted = [
        x + y, x * y, (x - rest) // y, rest, x & y, x | y, x ^ y, x << (y & 7), x >> (y & 7),
        x < y, np.minimum(x, y), np.maximum(x, y), ~x,
    ]  # fmt: skip
    assert np.array_equal(out.numpy(), np.stack(wanted))


TYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint8, torch.bool, torch.float8_e5m2, torch.float8_e4m3fn,
]  # fmt: skip
EIGHTS = {torch.float8_e5m2, torch.float8_e4m3fn}


@triton.jit
def cast_kernel(x_ptr, outs, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    for k in tl.static_range(len(outs)):
        tl.store(outs[k] + i, x.to(outs[k].dtype.element_ty))


@pytest.mark.parametrize("source", TYPES)
def test_casts(source):
    torch.manual_seed(1)
    x = (torch.randn(N) * 50).clamp(-120, 120)
    if source == torch.uint8:
        x = x.abs()
    x = x.to(source)
    targets = [
        each for each in TYPES
        if each != torch.bool
        and ((each.is_floating_point and source.is_floating_point) or not {each, source} & EIGHTS)
        and not (each == torch.uint8 and source.is_floating_point)
    ]  # fmt: skip
    outs = tuple(torch.zeros(N, dtype=each) for each in targets)
    cast_kernel[(1,)](x, outs, BLOCK=N)
    for target, out in zip(targets, outs, strict=True):
        wanted = (x.float() if source in EIGHTS else x).to(target)
        if target in EIGHTS:
            out, wanted = out.view(torch.uint8), wanted.view(torch.uint8)
        assert torch.equal(out, wanted), target


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_narrow_floats_and_random_roundings(dtype):
    n = 1 << 16
    x = torch.arange(-(n // 2), n // 2, dtype=torch.int32).to(torch.int16).view(dtype)
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (n,), dtype=torch.int64)
    y = bits.to(torch.int32).view(torch.float32)
    wide, narrow = torch.zeros(n), torch.zeros(n, dtype=dtype)
    cast_kernel[(1,)](x, (wide,), BLOCK=n)
    cast_kernel[(1,)](y, (narrow,), BLOCK=n)
    assert torch.equal(wide.nan_to_num(7), x.float().nan_to_num(7))
    assert torch.equal(narrow.nan_to_num(7), y.to(dtype).nan_to_num(7))


@triton.jit
def bool_kernel(x_ptr, out_ptr, flag, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=False)
    y = (x & (i > 3)) | flag
    tl.store(out_ptr + i, ~y, mask=i < n)
    tl.store(out_ptr + BLOCK, tl.sum(y.to(tl.int32), axis=0) > 5)


def test_bool():
    x = torch.rand(N) > 0.5
    out = torch.zeros(N + 1, dtype=torch.bool)
    bool_kernel[(1,)](x, out, False, 200, BLOCK=N)
    y = x & (torch.arange(N) > 3) & (torch.arange(N) < 200)
    assert torch.equal(out[:200], ~y[:200]) and not out[200:N].any() and out[N]
