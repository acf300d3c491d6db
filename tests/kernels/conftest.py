"""Kernel tests run compiled, on a GPU, or interpreted; Triton decides at import which it is.

Tests marked `interpret` need `TRITON_INTERPRET=1 pytest -m interpret tests/kernels`; `make test`
runs that as its own step.
"""

import os
import warnings
from collections.abc import Iterator

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from support.interpreter import repair
    from support.sanitizer import recorded_faults

    repair()
    warnings.filterwarnings("ignore", category=RuntimeWarning)

    @pytest.fixture(autouse=True)
    def no_faults() -> Iterator[None]:
        """Fail where an interpreted kernel has races or wrong addresses."""
        with recorded_faults() as found:
            yield
        assert found == set()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("interpret") and not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1: pytest -m interpret tests/kernels")
    if item.get_closest_marker("compiled") and INTERPRETED:
        pytest.skip("needs compiled kernels, but TRITON_INTERPRET=1 is set")


@pytest.fixture
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and blocks a row, although the vocabulary of the test is small."""
    from vllm_hsd.kernels import blocks

    chunk, block = request.module.CHUNK_AND_BLOCK
    monkeypatch.setattr(blocks, "CHUNK", chunk)
    monkeypatch.setattr(blocks, "BLOCK", block)
