"""Triton on a CPU in this process: `vllm_hsd.kernels.cpu_backend`, or Triton's interpreter.

vLLM's build for CPUs uses Triton only if it has a backend called "cpu". Where TRITON_INTERPRET is 1
kernels are interpreted all the same, and the backend is that name only.
"""

import os

import pytest

from vllm_hsd.kernels import cpu_backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def skip_what_cannot_run(item: pytest.Item) -> None:
    """Skip a test whose kernels this process cannot run."""
    marks = {mark.name for mark in item.iter_markers()}
    if "interpret_only" in marks and not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    if "compiled" in marks and INTERPRETED:
        pytest.skip("needs compiled kernels, but TRITON_INTERPRET=1 is set")


def kernel_class() -> type:
    """The class of kernels, whose `run` is called for every launch."""
    if INTERPRETED:
        from triton.runtime.interpreter import InterpretedFunction

        return InterpretedFunction
    from triton.runtime.jit import JITFunction

    return JITFunction


def install() -> None:
    """Let this process run kernels, and the V2 runner, on a CPU; before vLLM is imported."""
    cpu_backend.install()
    if INTERPRETED:
        from support import interpreter

        interpreter.repair()


def check_programs() -> None:
    """Let this process's launches check addresses, and run their programs out of order at once."""
    if not INTERPRETED:
        from vllm_hsd.kernels.cpu_backend import checks

        checks.ACTIVE.bounds, checks.ACTIVE.order, checks.ACTIVE.threads = True, 7, 2


def prepare_vllm() -> None:
    """Import vLLM's stand-ins for CUDA first.

    Its Triton kernel for top-k and top-p is none that the interpreter can run: torch does it there.
    """
    install()
    import vllm.v1.worker.cpu.shm  # noqa: F401  streams, events and pinned memory

    if INTERPRETED:
        from vllm.v1.sample.ops import topk_topp_sampler

        topk_topp_sampler.HAS_TRITON = False
