"""Every kernel compiles for sm_80 and sm_90 ahead of time, without a GPU."""

import pytest

from vllm_hsd.kernels.testing import builds

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize(
    ("name", "capability"),
    [(n, c) for n in builds.VARIANTS for c in (80, 90) if c == 90 or not n.endswith("_lse")],
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
