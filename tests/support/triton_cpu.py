"""A Triton backend named "cpu" that compiles nothing, so that vLLM's V2 runner starts on a CPU.

vLLM's build for CPUs uses Triton only if a backend of that name exists. Kernels run under Triton's
interpreter. Nothing is installed: `install` puts the backend into Triton's table, in this process.
"""

import torch
import triton.backends
from support import interpreter
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.backends.driver import DriverBase


class CpuDriver(DriverBase):
    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self):
        raise NotImplementedError

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device=None) -> int:
        return 0

    def get_device_interface(self):
        return torch.cpu


class CpuCompiler(BaseBackend):
    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict):
        raise RuntimeError("this backend compiles nothing: set TRITON_INTERPRET=1")

    def add_stages(self, stages: dict, options, language=None) -> None:
        raise RuntimeError("this backend compiles nothing: set TRITON_INTERPRET=1")

    def load_dialects(self, context) -> None:
        pass

    def get_module_map(self) -> dict:
        return {}


def install() -> None:
    """Let this process run the V2 runner on a CPU; call it before vLLM is imported.

    Raises:
        RuntimeError: TRITON_INTERPRET is not 1.
    """
    interpreter.repair()
    triton.backends.backends["cpu"] = triton.backends.Backend(CpuCompiler, CpuDriver)


def prepare_vllm() -> None:
    """Import vLLM's stand-ins for CUDA first, and leave top-k and top-p to its torch code.

    Its Triton kernel for them is none that the interpreter can run.
    """
    install()
    import vllm.v1.worker.cpu.shm  # noqa: F401  streams, events and pinned memory
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
