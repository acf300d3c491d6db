"""Control flow, memory and arguments in the CPU backend: programs against plain Python."""

import math

import torch
import triton
import triton.language as tl

N = 256


@triton.jit
def control_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    if pid >= n:
        return
    i = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    odd = i % 2 == 0
    even = i % 2 == 1
    count = 0
    for k in range(pid + 1):
        x = tl.load(x_ptr + k * BLOCK + i)
        odd, even = even, odd
        if k % 2 == 0:
            acc += x
        else:
            acc, best = best, acc
            acc = tl.maximum(acc, x)
            count += 1
    steps = 0
    while tl.sum(acc, axis=0) > 1.0:
        acc = acc * 0.5
        steps += 1
        if steps == 3:
            count += 100
    out = out_ptr + pid * (BLOCK + 2)
    tl.store(out + i, acc + tl.where((best > -1e30) & odd, best, 0))
    tl.store(out + BLOCK, count)
    tl.store(out + BLOCK + 1, steps)


def test_control_flow():
    torch.manual_seed(3)
    n, block = 6, 64
    x = torch.randn(n, block).abs()
    out = torch.full((n + 1, block + 2), -7.0)
    control_kernel[(n + 1,)](x, out, n, BLOCK=block)
    for pid in range(n):
        acc, best, count, steps = torch.zeros(block), torch.full((block,), -math.inf), 0, 0
        for k in range(pid + 1):
            if k % 2 == 0:
                acc = acc + x[k]
            else:
                acc, best = best, acc
                acc = torch.maximum(acc, x[k])
                count += 1
        while acc.sum() > 1:
            acc = acc * 0.5
            steps += 1
            count += 100 * (steps == 3)
        odd = torch.arange(block) % 2 == (pid + 1) % 2
        wanted = acc + torch.where((best > -1e30) & odd, best, 0)
        torch.testing.assert_close(out[pid, :block], wanted)
        assert out[pid, block] == count and out[pid, block + 1] == steps
    assert (out[n] == -7).all()


@triton.jit
def chosen(x_ptr, i, n, default):
    if i < n:
        return tl.load(x_ptr + i)
    return default + i


@triton.jit
def marked(x_ptr, i):
    if i > 2:
        tl.store(x_ptr, i)
        return
    tl.store(x_ptr + 1, i)


@triton.jit
def calling_kernel(x_ptr, out_ptr, n):
    for i in tl.range(0, n + 2):
        before = tl.load(out_ptr + i)
        value = chosen(x_ptr, i, n, 100)
        marked(x_ptr + n, i)
        tl.store(out_ptr + i, value + before)


def test_functions_that_are_called():
    """Triton does not inline those that return in the middle."""
    x, out = torch.arange(7, dtype=torch.int32), torch.ones(7, dtype=torch.int32)
    calling_kernel[(1,)](x, out, 5)
    assert out.tolist() == [1, 2, 3, 4, 5, 106, 107] and x.tolist() == [0, 1, 2, 3, 4, 6, 2]


@triton.jit
def alias_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i + 1, tl.load(x_ptr + i, mask=i < n, other=0), mask=i < n)
    y = tl.load(x_ptr + i)
    tl.store(x_ptr + i, y * 2)
    tl.store(x_ptr + BLOCK + i, y)


def test_loads_are_done_before_later_stores():
    x = torch.arange(2 * N, dtype=torch.float32)
    alias_kernel[(1,)](x, N - 1, BLOCK=N)
    y = torch.cat([torch.zeros(1), torch.arange(N - 1)])
    assert torch.equal(x[:N], y * 2) and torch.equal(x[N:], y)


@triton.jit
def kept_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.exp(tl.load(x_ptr + i) * 0.5) + 1
    tl.store(out_ptr + i, x, mask=i < n)
    tl.store(out_ptr + BLOCK, tl.sum(x, axis=0))


def test_arrays_that_a_masked_store_fills_are_whole():
    x = torch.randn(N)
    out = torch.zeros(N + 1)
    kept_kernel[(1,)](x, out, 5, BLOCK=N)
    torch.testing.assert_close(out[N], (torch.exp(x * 0.5) + 1).sum())


@triton.jit
def partly_used_kernel(index_ptr, x_ptr, out_ptr, sum_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    index = tl.load(index_ptr + i)
    other = tl.load(x_ptr + BLOCK + i)
    x = tl.load(x_ptr + index, mask=i < n, other=other)
    tl.store(sum_ptr, tl.sum(x, axis=0))
    tl.store(out_ptr + i, index)
    tl.store(out_ptr + BLOCK + i, other)


def test_what_a_masked_load_takes_of_some_lanes_is_whole_afterwards():
    """An address of lanes that are read, and what stands for those that are not."""
    n, block = 5, 16
    index, x = torch.arange(block).flip(0).int(), torch.arange(2.0 * block)
    out, total = torch.full((2 * block,), -7.0), torch.zeros(1)
    partly_used_kernel[(1,)](index, x, out, total, n, BLOCK=block)
    assert out.equal(torch.cat([index.float(), x[block:]]))
    assert total.item() == x[index[:n].long()].sum() + x[block + n :].sum()


@triton.jit
def large_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, x / tl.sum(x, axis=0) + tl.cumsum(x, axis=0))


def test_blocks_larger_than_a_stack():
    x = torch.ones(1 << 19)
    out = torch.zeros_like(x)
    large_kernel[(2,)](x, out, BLOCK=1 << 19)
    assert torch.equal(out, x / len(x) + torch.arange(1, len(x) + 1))


@triton.jit
def atomic_kernel(x_ptr, f_ptr, old_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    old = tl.atomic_add(x_ptr + i % 4, 1, mask=i < 200)
    tl.store(old_ptr + i, old, mask=i < 200)
    tl.atomic_max(x_ptr + 4 + i * 0, i)
    tl.atomic_or(x_ptr + 5, 6)
    tl.atomic_xchg(x_ptr + 6, 9)
    tl.atomic_cas(x_ptr + 7, 0, 5)
    tl.atomic_add(f_ptr + i % 2, 0.5)
    tl.atomic_min(f_ptr + 2, -3.0)


def test_atomics():
    x, f, old = torch.zeros(8, dtype=torch.int32), torch.zeros(3), torch.zeros(N, dtype=torch.int32)
    atomic_kernel[(2,)](x, f, old, BLOCK=N)
    assert x.tolist() == [100, 100, 100, 100, N - 1, 6, 9, 5]
    assert f.tolist() == [N / 2, N / 2, -3.0]


@triton.jit
def pointer_kernel(table_ptr, out_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = tl.load(table_ptr + row).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, BLOCK)
    bases = tl.load(table_ptr + (i % 2)).to(tl.pointer_type(tl.float32))
    tl.store(out_ptr + row * BLOCK + i, tl.load(base + i) + tl.load(bases + i // 2))


def test_loaded_pointers():
    a, b = torch.randn(N), torch.randn(N)
    table = torch.tensor([a.data_ptr(), b.data_ptr()])
    out = torch.zeros(2, N)
    pointer_kernel[(2,)](table, out, BLOCK=N)
    i = torch.arange(N)
    mixed = torch.where(i % 2 == 0, a[i // 2], b[i // 2])
    assert torch.equal(out, torch.stack([a + mixed, b + mixed]))


@triton.jit
def added(a, b):
    return a + b


@triton.jit
def reread_kernel(x_ptr, y_ptr, out_ptr, sum_ptr, BLOCK: tl.constexpr):
    i, j = tl.arange(0, BLOCK), tl.arange(0, 4)
    x = tl.exp(tl.load(x_ptr + i))
    table = tl.load(y_ptr + i[:, None] * 4 + j[None, :]) + x[:, None]
    tl.store(sum_ptr + i, tl.sum(table, axis=1))
    tl.store(x_ptr + i, i * 0.0)
    tl.store(out_ptr + i, x)


def test_a_load_that_another_shape_used_is_not_done_again_after_a_store():
    x, y, out, total = torch.rand(16), torch.rand(64), torch.zeros(16), torch.zeros(16)
    expected = torch.exp(x)
    reread_kernel[(1,)](x, y, out, total, BLOCK=16)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(total, y.view(16, 4).sum(1) + 4 * expected)


@triton.jit
def index_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i, j = tl.arange(0, BLOCK), tl.arange(0, 4)
    at = tl.arange(0, BLOCK * 4)
    tl.store(out_ptr + i, tl.load(x_ptr + (i >= n).to(tl.int32)))
    offsets = tl.reshape(i[:, None] * 8 + j[None, :], [BLOCK * 4])
    tl.store(out_ptr + BLOCK + at, tl.load(x_ptr + offsets))
    few = tl.reshape(i[:, None] * 0 + j[None, :] < n - 3, [BLOCK * 4])
    tl.store(out_ptr + 5 * BLOCK + at, 1, mask=few)
    large = (i - n).to(tl.uint32).to(tl.int64) < 100
    tl.store(out_ptr + 9 * BLOCK + i, 1, mask=large)


def test_indices_of_bools_of_views_that_merge_axes_and_of_unsigned_numbers():
    block, n = 16, 5
    x, i, j = torch.arange(10, 266).int(), torch.arange(16), torch.arange(4)
    out = torch.zeros(10 * block, dtype=torch.int32)
    index_kernel[(1,)](x, out, n, BLOCK=block)
    columns = (i[:, None] * 0 + j < n - 3).flatten()
    expected = [10 + (i >= n), x[(i[:, None] * 8 + j).flatten()], columns, i >= n]
    assert out.equal(torch.cat([each.int() for each in expected]))


@triton.jit
def small_kernel(x_ptr, bits_ptr, out_ptr, n, m, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.arange(0, 4), tl.histogram(tl.load(x_ptr + i), 4))
    tl.store(out_ptr + 4, tl.reduce(tl.load(bits_ptr + i) > 0, 0, added).to(tl.int32))
    first, second = tl.split(tl.join(n, m))
    tl.store(out_ptr + 5, first * second)


def test_what_a_histogram_leaves_out_sums_of_bits_and_parts_of_a_pair():
    x = torch.tensor([0, 1, 1, 3] * 3 + [4, 9, -1, 40], dtype=torch.int32)
    out = torch.zeros(6, dtype=torch.int32)
    small_kernel[(1,)](x, torch.ones(16), out, 5, 7, BLOCK=16)
    assert out.tolist() == [3, 6, 0, 3, 0, 35]
