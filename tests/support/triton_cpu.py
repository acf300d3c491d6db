"""Triton on a CPU in this process: `vllm_hsd.kernels.cpu_backend`, or Triton's interpreter."""

from triton import knobs

from vllm_hsd.kernels import cpu_backend
from vllm_hsd.kernels.cpu_backend import checks


def install() -> None:
    """Let this process run kernels, and the V2 runner, on a CPU; before vLLM is imported."""
    cpu_backend.install()
    if knobs.runtime.interpret:
        from support import interpreter

        interpreter.repair()


def check_programs() -> None:
    """Let this process's launches check addresses, and run their programs out of order at once."""
    checks.ACTIVE.bounds, checks.ACTIVE.order, checks.ACTIVE.threads = True, 7, 2


def prepare_vllm() -> None:
    """Import vLLM's stand-ins for CUDA first."""
    install()
    import vllm.v1.worker.cpu.shm  # noqa: F401  streams, events and pinned memory
