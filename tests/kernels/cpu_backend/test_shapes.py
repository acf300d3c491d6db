"""Operations of the CPU backend that move elements: views, joins, gathers, sorts, products."""

import pytest
import torch
import triton
import triton.language as tl

N = 256


@triton.jit
def shapes_kernel(x_ptr, out_ptr, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    if OP == "interleave":
        tl.store(out_ptr + tl.arange(0, 2 * N), tl.interleave(x, x + 100))
    elif OP == "split":
        a, b = tl.split(tl.reshape(x, (N // 2, 2)))
        tl.store(out_ptr + tl.arange(0, N // 2), a * 2)
        tl.store(out_ptr + N // 2 + tl.arange(0, N // 2), b)
    elif OP == "trans":
        y = tl.trans(tl.reshape(x, (4, N // 4)))
        tl.store(out_ptr + tl.arange(0, N // 4)[:, None] * 4 + tl.arange(0, 4)[None, :], y)
    elif OP == "ravel":
        y = tl.reshape(x, (4, N // 4)) + tl.arange(0, 4)[:, None]
        tl.store(out_ptr + i, tl.reshape(y, (N,)))
    elif OP == "ravelled trans":
        y = tl.trans(tl.reshape(x, (4, N // 4)) + tl.arange(0, 4)[:, None])
        tl.store(out_ptr + i, tl.reshape(y, (N,)))
    elif OP == "gather":
        tl.store(out_ptr + i, tl.gather(x * 2, (i * 7 + 3) % N, axis=0))
    elif OP == "cat":
        tl.store(out_ptr + tl.arange(0, 2 * N), tl.cat(x, x + 1, can_reorder=True))
    elif OP == "dot":
        a = tl.reshape(x, (16, N // 16))
        at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(out_ptr + at, tl.dot(a, tl.trans(a)))
    elif OP == "histogram":
        tl.store(out_ptr + tl.arange(0, 16), tl.histogram(i % 11, 16).to(tl.float32))
    elif OP == "sort":
        tl.store(out_ptr + i, tl.sort(x))
    elif OP == "flip":
        tl.store(out_ptr + i, tl.flip(x))


WANTED = {
    "interleave": lambda x: torch.stack([x, x + 100], 1).flatten(),
    "split": lambda x: torch.cat([x[::2] * 2, x[1::2]]),
    "trans": lambda x: x.view(4, N // 4).T.flatten(),
    "ravel": lambda x: (x.view(4, N // 4) + torch.arange(4)[:, None]).flatten(),
    "ravelled trans": lambda x: (x.view(4, N // 4) + torch.arange(4)[:, None]).T.flatten(),
    "gather": lambda x: (x * 2)[(torch.arange(N) * 7 + 3) % N],
    "cat": lambda x: torch.cat([x, x + 1]),
    "dot": lambda x: (x.view(16, -1) @ x.view(16, -1).T).flatten(),
    "histogram": lambda x: torch.bincount(torch.arange(N) % 11, minlength=16).float(),
    "sort": lambda x: x.sort()[0],
    "flip": lambda x: x.flip(0),
}


@pytest.mark.filterwarnings("ignore:tl.cat")
@pytest.mark.parametrize("op", WANTED)
def test_shape(op):
    x = torch.randn(N)
    out = torch.zeros(2 * N)
    shapes_kernel[(1,)](x, out, OP=op, N=N)
    wanted = WANTED[op](x)
    torch.testing.assert_close(out[: len(wanted)], wanted, rtol=1e-5, atol=1e-5)


@triton.jit
def rows_kernel(x_ptr, y_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr):
    """A dear row for every row of a block, and a column for every column."""
    i, j = tl.arange(0, M), tl.arange(0, K)
    row = tl.exp(tl.load(x_ptr + j) * 0.5)
    column = tl.exp(tl.load(y_ptr + i) * 0.5)
    tl.store(out_ptr + i[:, None] * K + j[None, :], row[None, :] * column[:, None])


def test_broadcast_rows_and_columns():
    x, y = torch.randn(64), torch.randn(8)
    out = torch.zeros(8, 64)
    rows_kernel[(1,)](x, y, out, M=8, K=64)
    torch.testing.assert_close(out, (x * 0.5).exp()[None] * (y * 0.5).exp()[:, None])
