"""The processor that this process runs on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def processor() -> str:
    """Its name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def flags() -> frozenset[str]:
    """Its features as in /proc/cpuinfo; empty where there is no such file."""
    return frozenset(_cpuinfo("flags").split())


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpuinfo(key: str) -> str:
    """The first processor's entry, or an empty text."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")
