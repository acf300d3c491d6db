"""Every kernel is built for sm_80 and sm_90 ahead of time, without a GPU: nothing may spill."""

import os

import pytest
from vllm_hsd.kernels import builds

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the kernels are interpreted, not compiled"
)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", builds.VARIANTS)
def test_builds_without_spills(name, capability):
    usage = builds.build(name, capability)
    assert usage.stack == 0 and usage.spilled == 0
    # Two programs of 256 threads must fit a multiprocessor's 65,536 registers where rows are
    # streamed; tree traversal runs one program a request.
    if capability == 90 and name != "tree_traverse":
        assert usage.registers <= 128
