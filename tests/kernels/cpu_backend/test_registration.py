"""When the CPU backend is there: on a CPU with a C compiler, unless another one serves."""

import os
import subprocess
import sys

import pytest

SHOW = """
import sys
import torch
{before}
from vllm.triton_utils import HAS_TRITON
import triton.backends
found = triton.backends.backends.get("cpu")
print(HAS_TRITON, found and found.driver.__module__)
"""
OTHER_BACKEND = """
import triton.backends
from vllm_hsd.kernels.cpu_backend import compiler, driver
Driver = type("Driver", (driver.CPUDriver,), {"__module__": "triton_cpu"})
triton.backends.backends["cpu"] = triton.backends.Backend(compiler.CPUBackend, Driver)
"""
OURS = "vllm_hsd.kernels.cpu_backend.driver"


def seen(tmp_path, runner: str | None, before: str = "") -> str:
    """What a process sees in which vLLM finds the entry point of pyproject.toml."""
    folder = tmp_path / "vllm_hsd_entry-0.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-hsd-entry\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nhsd = vllm_hsd.kernels.cpu_backend:platform\n"
    )
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    environment.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    environment.pop("TRITON_INTERPRET", None)
    if runner is not None:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = runner
    paths = [str(tmp_path), *sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [sys.executable, "-c", SHOW.format(before=before)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("runner", "before", "wanted"),
    [
        (None, "", f"True {OURS}"),
        ("0", "", "False None"),
        ("1", "torch.cuda.is_available = lambda: True", "False None"),
        ("1", OTHER_BACKEND, "True triton_cpu"),
        *(
            pytest.param(runner, before, wanted, marks=pytest.mark.slow)
            for runner, before, wanted in (
                (None, "import os; os.environ.update(PATH='', CC='')", "False None"),
                ("1", "", f"True {OURS}"),
            )
        ),
    ],
)
def test_vllm_finds_it_where_nothing_else_serves(tmp_path, runner, before, wanted):
    assert seen(tmp_path, runner, before) == wanted


def test_it_is_not_active_on_a_host_with_a_gpu(monkeypatch):
    import torch

    from vllm_hsd.kernels.cpu_backend.driver import CPUDriver

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    assert CPUDriver.is_active()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not CPUDriver.is_active()
