"""The driver of the backend: when it is active, and how compiled kernels are loaded."""

from __future__ import annotations

import ctypes
import hashlib
import os

import torch
from triton.backends import driver as base
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager
from triton.testing import do_bench

from . import launcher


class _Utils:
    """What Triton asks of a driver beside launches."""

    def __init__(self) -> None:
        self.loaded: dict[str, tuple[ctypes.CDLL, int]] = {}

    def get_device_properties(self, device: int) -> dict:
        return {
            "max_shared_mem": 1 << 30, "max_num_regs": 1 << 16, "warpSize": 1, "warp_size": 1,
            "multiprocessor_count": os.cpu_count(), "sm_clock_rate": 1, "mem_clock_rate": 1,
            "mem_bus_width": 64,
        }  # fmt: skip

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple:
        """(library, its entry, registers, spills, most threads) of a compiled kernel."""
        key = hashlib.sha256(kernel).hexdigest()
        if key not in self.loaded:
            cache = get_cache_manager(key)
            path = cache.get_file("kernel.so") or cache.put(kernel, "kernel.so", binary=True)
            self.loaded[key] = launcher.load(path)
        return *self.loaded[key], 0, 0, 1 << 30

    def unload_module(self, module: ctypes.CDLL) -> None:
        pass


class CPUDriver(base.DriverBase):
    """Runs kernels on tensors in the host's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.utils = _Utils()
        self.launcher_cls = launcher.make
        launcher.replace_launches()

    @classmethod
    def is_active(cls) -> bool:
        return not torch.cuda.is_available() and not torch.xpu.is_available()

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", "native", 1)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        return do_bench

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_interface(self):
        return torch.cpu

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return (0, 0)
