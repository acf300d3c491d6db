"""A backend of Triton that compiles kernels for the host's CPU; see README.md.

TTIR text -> `parser`, `ir` -> `plan`, `generator`, `codegen` -> C -> `toolchain`; `compiler` and
`driver` are what Triton calls, `launcher` runs compiled kernels.
"""

from __future__ import annotations

import os


def install() -> None:
    """Put the backend into Triton's table of this process as "cpu", unless it has one of that name.

    vLLM uses Triton on a CPU if that name is there when `vllm.triton_utils` is imported.
    """
    import triton.backends

    if "cpu" not in triton.backends.backends:
        from .compiler import CPUBackend
        from .driver import CPUDriver

        triton.backends.backends["cpu"] = triton.backends.Backend(CPUBackend, CPUDriver)


def platform() -> None:
    """vLLM's entry point for platforms, which it calls before it looks for Triton's backends.

    It names no platform. Where `VLLM_USE_V2_MODEL_RUNNER` asks for the V2 runner, which needs
    Triton, and there is no GPU, this backend serves.
    """
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        import torch

        if not torch.cuda.is_available() and not torch.xpu.is_available():
            install()
