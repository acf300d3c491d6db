"""Small cases of every kernel, with all checks of the CPU backend, and interpreted.

Tests marked `every_kernel` compare them with plain code. So what is compiled for the CPU, which all
other tests run, computes what Triton's own interpreter does.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.kernel_builds import kernels_of_package

from vllm_hsd.kernels.cpu_backend.checks import Checks

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("by", "marked"),
    [
        (repr(Checks(bounds=True, order=7, threads=2)), "every_kernel"),
        ("interpreter", "every_kernel or interpreted"),
    ],
    ids=["checked", "interpreted"],
)
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_kernel_runs(by, marked, tmp_path):
    file = tmp_path / "kernels"
    environment = {**os.environ, "HSD_TEST_KERNELS": str(file)}
    if by == "interpreter":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "support.recorded_kernels"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-m", f"({marked}) and not slow", HERE],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    launched = {line.removeprefix(f"{by} ") for line in file.read_text().splitlines()}
    assert kernels_of_package() - launched == set()
