"""The kernels between the forward passes of a proposal, on the GPU against their references."""

from benchmarks.gpu.items import Finding, Setting
from benchmarks.gpu.pytest_items import run_tests


def run(setting: Setting) -> Finding:
    """See `tests/kernels/test_proposals_on_gpu.py`."""
    return run_tests(setting, "tests/kernels/test_proposals_on_gpu.py")
