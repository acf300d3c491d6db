"""The short way of a launch takes the kernel that Triton's way would, and hands the same on."""

import ctypes
from itertools import product
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction, KernelInterface

from vllm_hsd.kernels.cpu_backend import launcher

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of the CPU backend")
FACTOR = tl.constexpr(3)


@triton.jit
def kinds_kernel(out_ptr, x_ptr, n, f, C: tl.constexpr, D: tl.constexpr = 5):
    tl.store(out_ptr, n + f)
    if C is True:
        tl.store(out_ptr + 1, 10)
    elif C is None:
        tl.store(out_ptr + 1, 20)
    else:
        tl.store(out_ptr + 1, C)
    tl.store(out_ptr + 2, D)
    if x_ptr is not None:
        tl.store(out_ptr + 3, tl.load(x_ptr))
    tl.store(out_ptr + 4, tl.program_id(0) + 100 * tl.num_programs(1))


@triton.jit
def global_kernel(out_ptr):
    tl.store(out_ptr, FACTOR)


XS = [
    torch.tensor([3.5]), None, torch.tensor([3]), torch.tensor([3.5], dtype=torch.bfloat16),
    torch.nn.Parameter(torch.tensor([4.5])),
]  # fmt: skip
CALLS = [
    ((1, 2.5, 7), {}),
    ((2, 2.5, 7), {}),
    ((1 << 40, 2.5, 7), {}),
    ((-3, 2.5, 7), {"D": 6}),
    ((1, 2.5, True), {}),
    ((1, 2.5, 1), {}),
    ((1, 2.5, 1.5), {}),
    ((1, 2.5, None), {}),
    ((True, 2.5, 7), {}),
    ((1, 2, 7, 8), {}),
    ((1,), {"C": 4, "f": 0.5}),
    ((1,), {"f": 0.5, "C": 4, "num_warps": 8}),
]
# Every call with the first x and with None, the first call with the others, too.
GIVEN = [*product(CALLS, XS[:2]), *product(CALLS[:1], XS[2:])]


@pytest.fixture(autouse=True)
def short_way(monkeypatch):
    """Checks of other tests may have kept it away."""
    monkeypatch.setattr(JITFunction, "__getitem__", KernelInterface.__getitem__)
    monkeypatch.setattr(JITFunction, "__getitem__", launcher.short_way())


def results() -> list[list[float]]:
    found = []
    for (args, options), x in GIVEN:
        out = torch.zeros(5, dtype=torch.float64)
        kinds_kernel[(3, 2)](out, x, *args, **options)
        found.append(out.tolist())
    return found


def test_all_kinds_of_arguments():
    """Triton's way while its `run` is replaced; then twice, when the kernels are known."""
    launches, run = [], JITFunction.run
    with mock.patch.object(JITFunction, "run", lambda *a, **k: launches.append(1) or run(*a, **k)):
        by_triton = results()
    assert len(launches) == len(by_triton)
    # Of calls 2, 3 and 7 with the first x: 64-bit and negative integers, defaults, None.
    wanted = [[float(1 << 40), 7, 5, 3.5], [-0.5, 7, 6, 3.5], [3.5, 20, 5, 3.5]]
    assert [by_triton[2 * call][:4] for call in (2, 3, 7)] == wanted
    assert results() == by_triton
    assert results() == by_triton


def test_kernels_are_found_without_triton(monkeypatch):
    results()
    monkeypatch.setattr(type(kinds_kernel), "create_binder", None)
    monkeypatch.setattr(kinds_kernel, "device_caches", None)
    results()
    out = torch.zeros(1)
    global_kernel[(1,)](out)
    monkeypatch.setattr(global_kernel, "device_caches", None)
    global_kernel[(1,)](out)
    assert out.item() == 3


def test_grids():
    out = torch.zeros(5)
    for grid in ((4,), [4], (4, 1, 1), lambda given: (given["n"] + given["D"] - 3,)):
        out.zero_()
        kernel = kinds_kernel[grid](out, None, 2, 0.5, 7)
        kernel = kinds_kernel[grid](out, None, 2, 0.5, 7)
        assert out[4] == 103 and kernel.name == "kinds_kernel"
    out.zero_()
    kinds_kernel[(0,)](out, None, 2, 0.5, 7)
    assert out.sum() == 0


def test_mistakes_are_those_of_triton():
    out = torch.zeros(5)
    kinds_kernel[(1,)](out, None, 1, 2.5, 7)
    with pytest.raises(TypeError, match="missing"):
        kinds_kernel[(1,)](out, None, 1, 2.5)
    with pytest.raises(TypeError, match="multiple values"):
        kinds_kernel[(1,)](out, None, 1, 2.5, 7, n=3)
    with pytest.raises((KeyError, TypeError), match="unknown"):
        kinds_kernel[(1,)](out, None, 1, 2.5, 7, unknown=3)


def test_a_changed_global_is_refused(monkeypatch):
    out = torch.zeros(1)
    for _ in range(2):
        global_kernel[(1,)](out)
    assert out.item() == 3
    monkeypatch.setitem(global_kernel.fn.__globals__, "FACTOR", tl.constexpr(4))
    with pytest.raises(RuntimeError, match="FACTOR has changed"):
        global_kernel[(1,)](out)


def test_hooks_are_called():
    calls, out = [], torch.zeros(5)
    args = out, None, 1, 2.5, 7
    kinds_kernel[(1,)](*args)
    enter = triton.knobs.runtime.launch_enter_hook
    enter.add(calls.append)
    try:
        kinds_kernel[(1,)](*args)
    finally:
        enter.remove(calls.append)
    kinds_kernel[(1,)](*args)
    assert len(calls) == 1


@triton.jit
def row_sums_kernel(x_ptr, out_ptr, N: tl.constexpr):
    lanes, row = tl.arange(0, 1024), tl.program_id(0)
    total = tl.zeros([1024], tl.float32)
    for first in range(0, N, 1024):
        total += tl.exp(tl.load(x_ptr + row * N + first + lanes))
    tl.store(out_ptr + row, tl.sum(total, axis=0))


@pytest.fixture
def pool_of():
    """Puts a function in the place of `GOMP_parallel`, and so many threads."""
    yield launcher.extension().set_pool
    launcher.extension().set_pool(launcher.openmp(), torch.get_num_threads())


def test_long_launches_take_the_threads_of_openmp(pool_of):
    asked = []
    WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    @ctypes.CFUNCTYPE(None, WORK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def pool(work, data, threads, flags):
        asked.append(threads)
        work(data)

    pool_of(ctypes.cast(pool, ctypes.c_void_p).value, 4)
    for rows, size in ((64, 1 << 16), (64, 1 << 16), (1, 1 << 16), (2, 1 << 16), (64, 1024)):
        x, out = torch.rand(rows, size), torch.empty(rows)
        row_sums_kernel[(rows,)](x, out, N=size)
        torch.testing.assert_close(out, x.exp().sum(1), rtol=1e-4, atol=0)
    # The first launch goes Triton's way, the second is timed.
    row_sums_kernel[(64,)](torch.rand(64, 1 << 16), torch.empty(64), N=1 << 16)
    assert max(asked) == 4


def test_a_real_pool_gives_the_same(pool_of):
    assert launcher.openmp()
    x, found = torch.rand(64, 1 << 16), []
    for threads in (1, 2):
        pool_of(launcher.openmp(), threads)
        for _ in range(4):
            found.append(torch.empty(64))
            row_sums_kernel[(64,)](x, found[-1], N=1 << 16)
    assert all(each.equal(found[0]) for each in found)
