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

    It names no platform. On a CPU vLLM's V2 runner, which needs Triton, then serves all its engines
    by this backend, unless `VLLM_USE_V2_MODEL_RUNNER` is 0, a GPU is there or no compiler is.
    """
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0":
        import torch

        from . import toolchain

        gpu = torch.cuda.is_available() or torch.xpu.is_available()
        if not gpu and toolchain.missing() is None:
            install()
