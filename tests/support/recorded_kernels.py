"""A plugin of pytest: which kernels tests launch, by "interpreter" or with which checks."""

import os
from pathlib import Path

from triton import knobs
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from vllm_hsd.kernels.cpu_backend import checks

LAUNCHED = set()


def pytest_collection_finish() -> None:
    kernels = InterpretedFunction if knobs.runtime.interpret else JITFunction
    run = kernels.run

    def record(self, *args, **kwargs):
        by = "interpreter" if kernels is InterpretedFunction else repr(checks.ACTIVE)
        LAUNCHED.add(f"{by} {self.fn.__name__}")
        return run(self, *args, **kwargs)

    kernels.run = record


def pytest_sessionfinish() -> None:
    Path(os.environ["HSD_TEST_KERNELS"]).write_text("\n".join(sorted(LAUNCHED)))
