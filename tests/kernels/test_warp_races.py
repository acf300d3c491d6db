"""`support.warp_races` finds the races that are put in, and no others."""

import pytest
import torch
import triton
import triton.language as tl
from support.kernel_batches import make_trees
from support.warp_races import recorded_races

from vllm_hsd.kernels.tree_verify import verify_tree

pytestmark = pytest.mark.interpreted
LANES = 128


@pytest.fixture(autouse=True)
def no_races() -> None:
    """In the place of what fails where there are some."""


@triton.jit
def reversed_kernel(out_ptr, LANES: tl.constexpr, BARRIER: tl.constexpr):
    lane = tl.arange(0, LANES)
    tl.store(out_ptr + lane, lane + 1)
    if BARRIER:
        tl.debug_barrier()
    tl.store(out_ptr + LANES + lane, tl.load(out_ptr + LANES - 1 - lane))


@triton.jit
def own_kernel(out_ptr, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    tl.store(out_ptr + lane, lane + 1)
    tl.store(out_ptr + LANES + lane, tl.load(out_ptr + lane))


@triton.jit
def counter_kernel(out_ptr):
    count = tl.load(out_ptr)
    tl.store(out_ptr, count + 1)


@triton.jit
def atomic_kernel(out_ptr, USED: tl.constexpr):
    count = tl.load(out_ptr)
    if USED:
        before = tl.atomic_add(out_ptr + 1, 1)
        count += before
    else:
        tl.atomic_add(out_ptr + 1, 1)
    tl.store(out_ptr, count + 1)


@pytest.mark.parametrize(
    ("kernel", "arguments", "warps", "races"),
    [
        (reversed_kernel, (LANES, False), 4, True),
        (reversed_kernel, (LANES, True), 4, False),
        (reversed_kernel, (LANES, False), 1, False),
        (own_kernel, (LANES,), 4, False),
        # A lane of which each warp has a copy is stored by one.
        (own_kernel, (16,), 4, True),
        (counter_kernel, (), 4, True),
        (counter_kernel, (), 1, False),
        # All threads wait for an atomic's result, if it is used.
        (atomic_kernel, (False,), 4, True),
        (atomic_kernel, (True,), 4, False),
    ],
)
def test_warps_race_where_no_barrier_is_between(kernel, arguments, warps, races):
    with recorded_races() as found:
        kernel[(1,)](torch.zeros(2 * LANES, dtype=torch.int32), *arguments, num_warps=warps)
    assert bool(found) == races


def test_a_tree_is_verified_in_the_order_of_its_barriers(monkeypatch):
    batch = make_trees(4, 40)
    with recorded_races() as found:
        verify_tree(**batch)
        assert found == set()
        monkeypatch.setattr(tl, "debug_barrier", lambda *_, **__: None)
        verify_tree(**batch)
    assert any("tree_kernels.py" in each for each in found)
