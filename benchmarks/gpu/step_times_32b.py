"""`step_times` with a target of 32B, whose random weights take 65 GB."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import engines, step_times
from benchmarks.gpu.items import Finding, Setting

NEEDED = 100 << 30


def run(setting: Setting) -> Finding:
    """See `step_times.measure`."""
    engines.require_vllm()
    if not setting.toy:
        memory = torch.cuda.get_device_properties(0).total_memory
        if memory < NEEDED:
            pytest.skip(f"needs {NEEDED >> 30} GiB of GPU memory, has {memory >> 30}.")
    return step_times.measure(setting, "32B")
