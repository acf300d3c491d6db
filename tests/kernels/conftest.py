"""Kernels run compiled: for a CPU (`vllm_hsd.kernels.cpu_backend`) with its checks, or on a GPU."""

from collections.abc import Iterator

import pytest
from support import triton_cpu
from triton import knobs

triton_cpu.install()
triton_cpu.check_programs()


if knobs.runtime.interpret:
    from support.warp_races import recorded_races

    @pytest.fixture(autouse=True)
    def no_races() -> Iterator[None]:
        """Fail where warps of an interpreted kernel race."""
        with recorded_races() as found:
            yield
        assert found == set()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("interpreted") and not knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1: test_every_kernel.py runs it")


@pytest.fixture
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and blocks a row, although the vocabulary of the test is small."""
    from vllm_hsd.kernels import blocks

    chunk, block = request.module.CHUNK_AND_BLOCK
    monkeypatch.setattr(blocks, "CHUNK", chunk)
    monkeypatch.setattr(blocks, "BLOCK", block)
