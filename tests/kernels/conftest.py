"""Kernel tests run compiled: for a CPU (`vllm_hsd.kernels.cpu_backend`), or on a GPU.

With TRITON_INTERPRET=1 they are interpreted: `make test-slow` does so with those marked `interpret`
or `interpret_only`.
"""

import warnings
from collections.abc import Iterator

import pytest
from support import triton_cpu

triton_cpu.install()
triton_cpu.check_programs()

if triton_cpu.INTERPRETED:
    from support.sanitizer import recorded_faults

    warnings.filterwarnings("ignore", category=RuntimeWarning)

    @pytest.fixture(autouse=True)
    def no_faults() -> Iterator[None]:
        """Fail where an interpreted kernel has races or wrong addresses."""
        with recorded_faults() as found:
            yield
        assert found == set()


def pytest_runtest_setup(item: pytest.Item) -> None:
    triton_cpu.skip_what_cannot_run(item)


@pytest.fixture
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and blocks a row, although the vocabulary of the test is small."""
    from vllm_hsd.kernels import blocks

    chunk, block = request.module.CHUNK_AND_BLOCK
    monkeypatch.setattr(blocks, "CHUNK", chunk)
    monkeypatch.setattr(blocks, "BLOCK", block)
