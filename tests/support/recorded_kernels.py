"""A plugin of pytest: the first and the last case of each test, and which kernels they launch.

The variable HSD_TEST_KERNELS names the file. A line has "interpreter" or the checks, and a kernel.
"""

import os
from pathlib import Path

import pytest
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from vllm_hsd.kernels.cpu_backend import checks

LAUNCHED = set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out all cases of a test but the first and the last."""
    ends = [{item.originalname: item for item in order} for order in (items, reversed(items))]
    kept = {id(item) for each in ends for item in each.values()}
    items[:] = [item for item in items if id(item) in kept]


def pytest_collection_finish() -> None:
    """Record launches from here on."""
    kernels = InterpretedFunction if knobs.runtime.interpret else JITFunction
    run = kernels.run

    def record(self, *args, **kwargs):
        by = "interpreter" if kernels is InterpretedFunction else repr(checks.ACTIVE)
        LAUNCHED.add(f"{by} {self.fn.__name__}")
        return run(self, *args, **kwargs)

    kernels.run = record


def pytest_sessionfinish() -> None:
    """Write the file."""
    Path(os.environ["HSD_TEST_KERNELS"]).write_text("\n".join(sorted(LAUNCHED)))
