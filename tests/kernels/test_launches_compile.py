"""Every launch of serving compiles for sm_80, sm_90 and sm_100, without a GPU, for any batch."""

import pytest
import triton
import triton.language as tl
from support import kernel_builds as builds
from support import launch_cases, meta_tensors
from triton.runtime.jit import JITFunction


@triton.jit
def assigned_twice_kernel(NUMBER: tl.constexpr):
    for i in tl.static_range(NUMBER):
        k: tl.constexpr = i  # noqa: F841


# Bytes: ptxas puts a register or two aside that a launch uses once. Four of them, if the innermost
# loops, which read thousands of entries, do next to nothing with them; more, if they do not touch
# them. One program walks a tree of 64 nodes.
FREE_STACK, SOME_STACK, MOST_STACK, STACK_OF_TREE = 8, 16, 40, 112
# Above four, by Triton and capability: verification of rows that are not aligned.
MOST_IN_LOOPS = {("3.7.1", 100): 15}
# Arguments of verification that change how a number of each request is read, outside of loops:
# of launches that differ in these only, the fast suite compiles one.
ALIKE = ("HAS_LENGTH", "draft_index_ptr")


@pytest.mark.parametrize(
    ("cases", "capability"),
    [
        ("SHORT", 90),
        # Ten minutes of a quiet core.
        *(
            pytest.param("ALL", c, marks=(pytest.mark.slow, pytest.mark.timeout(3600)))
            for c in (80, 90, 100)
        ),
    ],
)
def test_every_launch_compiles_and_no_loop_spills(cases, capability):
    alike = ALIKE if cases == "SHORT" else ()
    with builds.compile_launches(capability, alike) as compiled:
        launch_cases.launch(getattr(launch_cases, cases))
    assert not compiled.failed, list(compiled.failed)
    assert compiled.built
    usages = [(build, builds.usage(build)) for build in compiled.built.values()]
    for build, use in usages:
        if build.name == "traverse_kernel":
            assert use.stack <= STACK_OF_TREE, (build, use)
        elif use.stack > FREE_STACK:
            assert use.stack <= MOST_STACK, (build, use)
            most = MOST_IN_LOOPS.get((triton.__version__, capability), 4)
            in_loops = most if use.stack <= SOME_STACK else 0
            assert builds.spills_in_loops(build) <= in_loops, (build, use)
    if cases == "SHORT":
        for build, usage in usages:
            # A few lanes gather the logits of drafted tokens; rows are read 16 bytes at a time.
            assert usage.narrow_loads <= 8, (build, usage)
            # Two programs of 256 threads fit a multiprocessor's 65,536 registers.
            assert usage.registers <= 128, (build, usage)
            if build.name.startswith("commit"):
                assert usage.load_bits == usage.store_bits == 128, (build, usage)


def test_every_kernel_is_launched(monkeypatch):
    launched = set()
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, **__: launched.add(self.fn.__name__))
    launch_cases.launch(launch_cases.ALL)
    assert launched == builds.kernels_of_package()


BATCHES = (1, 2, 3, 4, 5, 8, 16)


@pytest.mark.parametrize("number", range(len(launch_cases.SHORT)))
def test_launches_have_the_same_keys_at_every_batch_size(number, monkeypatch):
    """Triton compiles nothing anew for a number of requests: such a step would wait for it."""
    by_batch = []
    for batch in BATCHES:
        monkeypatch.setattr(meta_tensors, "BATCH", batch)
        with builds.launch_keys(90) as found:
            launch_cases.launch([launch_cases.SHORT[number]])
        by_batch.append(found)
    differ = {
        f"{kernel}, {batch} requests"
        for batch, found in zip(BATCHES, by_batch, strict=True)
        for kernel, keys in found.items()
        if keys != by_batch[2][kernel]
    }
    assert by_batch[0] and not differ


def test_a_kernel_that_does_not_compile_is_named():
    with builds.compile_launches(90) as compiled:
        for number in (1, 2):
            assigned_twice_kernel[(1,)](number)
    ((name, message),) = compiled.failed
    assert name == "assigned_twice_kernel" and "k is already defined" in message
