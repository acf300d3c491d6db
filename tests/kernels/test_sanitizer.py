"""`support.sanitizer` finds the faults that are put in, and no others."""

import pytest
import torch
import triton
import triton.language as tl
from support.kernel_batches import make_trees

from vllm_hsd.kernels.tree_verify import verify_tree

pytestmark = pytest.mark.interpret_only

WARPS = 4
LANES = 32 * WARPS


@pytest.fixture(autouse=True)
def no_faults() -> None:
    """In the place of what fails where there are faults."""


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
def same_place_kernel(out_ptr, VALUE: tl.constexpr):
    tl.store(out_ptr, VALUE if VALUE else tl.program_id(0) + 1)


@triton.jit
def one_more_kernel(out_ptr, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    tl.store(out_ptr + lane, tl.load(out_ptr + lane + 1))


@triton.jit
def last_arriver_kernel(
    out_ptr, arrived_ptr, LANES: tl.constexpr, SEM: tl.constexpr, BARRIER: tl.constexpr
):
    programs = tl.num_programs(0)
    lane = tl.arange(0, LANES)
    tl.store(out_ptr + tl.program_id(0) * LANES + lane, lane + 1)
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(arrived_ptr, 1, sem=SEM) == programs - 1:
        total = tl.zeros([LANES], tl.int32)
        for each in range(programs):
            total += tl.load(out_ptr + each * LANES + lane)
        tl.store(out_ptr + programs * LANES + lane, total)


def faults(kernel, *arguments, programs: int = 1, warps: int = WARPS) -> set[str]:
    """Which of "warps" and "programs" race, and whether an access is "outside"."""
    from support.sanitizer import recorded_faults

    out, arrived = (torch.zeros(2 * LANES, dtype=torch.int32) for _ in range(2))
    takes_arrived = kernel is last_arriver_kernel
    with recorded_faults() as found:
        kernel[(programs,)](out, *[arrived] * takes_arrived, *arguments, num_warps=warps)
    return {each.split(":")[0] for each in found}


def test_warps():
    assert faults(reversed_kernel, LANES, False) == {"warps"}
    assert faults(reversed_kernel, LANES, True) == set()
    assert faults(reversed_kernel, LANES, False, warps=1) == set()
    assert faults(own_kernel, LANES) == set()
    # A lane of which each warp has a copy is stored by one.
    assert faults(own_kernel, 16) == {"warps"}
    assert faults(counter_kernel) == {"warps"}
    assert faults(counter_kernel, warps=1) == set()


def test_programs():
    assert faults(same_place_kernel, 0, programs=3) == {"programs"}
    assert faults(same_place_kernel, 7, programs=3) == set()
    assert faults(counter_kernel, programs=2, warps=1) == {"programs"}
    assert faults(last_arriver_kernel, 64, "acq_rel", True, programs=3) == set()
    assert faults(last_arriver_kernel, 64, "acq_rel", False, programs=3) == {"programs"}
    assert faults(last_arriver_kernel, 64, "relaxed", True, programs=3) == {"programs"}


def test_addresses():
    assert faults(one_more_kernel, LANES, warps=1) == set()
    assert faults(one_more_kernel, 2 * LANES, warps=1) == {"outside"}


def test_a_tree_is_verified_in_the_order_of_its_barriers(monkeypatch):
    from support.sanitizer import recorded_faults

    batch = make_trees(4, 40)
    with recorded_faults() as found:
        verify_tree(**batch)
        assert found == set()
        monkeypatch.setattr(tl, "debug_barrier", lambda *_, **__: None)
        verify_tree(**batch)
    assert any("tree_kernels.py" in each for each in found)
