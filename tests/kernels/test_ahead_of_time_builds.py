"""Every kernel compiles for sm_80, sm_90 and sm_100 ahead of time, without a GPU."""

import pytest

from vllm_hsd.kernels.testing import builds

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        # The fast suite compiles for Hopper; `make bench-kernel-builds` writes the whole table.
        pytest.param(n, c, marks=() if c == 90 else pytest.mark.slow)
        for n in builds.VARIANTS
        for c in (80, 90, 100)
    ],
)
def test_builds_without_spills_and_with_wide_loads(name, capability):
    usage = builds.build(name, capability)
    assert usage.stack == 0 and usage.spilled == 0
    # A few lanes gather the logits of drafted tokens; rows are read 16 bytes at a time.
    assert usage.narrow_loads <= 8
    # Two programs of 256 threads must fit a multiprocessor's 65,536 registers where rows are
    # streamed; tree traversal runs one program a request.
    if capability == 90 and name != "tree_traverse":
        assert usage.registers <= 128
    if name.startswith("commit"):
        assert usage.load_bits == usage.store_bits == 128
