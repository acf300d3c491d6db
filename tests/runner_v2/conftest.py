"""The V2 runner's tests run interpreted: Triton and vLLM decide at import (see support.triton_cpu).

`TRITON_INTERPRET=1 pytest -m interpret tests/runner_v2`; `make test` runs that as its own step.
"""

import os
import warnings

import pytest
from support import engines

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from support import triton_cpu

    triton_cpu.install()
    warnings.filterwarnings("ignore", category=RuntimeWarning)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("interpret") and not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1: pytest -m interpret tests/runner_v2")


@pytest.fixture(scope="session")
def plain(family):
    """Tokens without speculation, on the V1 runner."""
    from support.v2_engines import JOBS

    jobs = {"greedy": JOBS["greedy"]}
    found = engines.run_engine({"model": family.target}, jobs)["greedy"]["outputs"]
    return [output[0]["ids"] for output in found]
