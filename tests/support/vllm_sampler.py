"""vLLM's V2 rejection sampler on its own, loaded from the files of the installed package.

Works where `import vllm` does not (no GPU, no compiled extension) and under Triton's interpreter,
because only the modules that the sampler needs are executed, with the real Triton.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path

_PACKAGES = (
    "vllm",
    "vllm.v1",
    "vllm.v1.spec_decode",
    "vllm.v1.watermarking",
    "vllm.v1.watermarking.prfs",
    "vllm.v1.worker",
    "vllm.v1.worker.gpu",
    "vllm.v1.worker.gpu.sample",
    "vllm.v1.worker.gpu.spec_decode",
)


def load_v2_sampler() -> tuple[Callable, Callable, Callable]:
    """Functions (rejection_sample, apply_temperature, gumbel_sample) of the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("vllm is not installed")
    root = Path(spec.submodule_search_locations[0])
    import triton
    import triton.language as tl
    import triton.language.extra.libdevice as tldevice

    saved = _forget_vllm()
    try:
        for name in _PACKAGES:
            package = types.ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = package
        triton_utils = types.ModuleType("vllm.triton_utils")
        triton_utils.__dict__.update(tl=tl, triton=triton, tldevice=tldevice, HAS_TRITON=True)
        sys.modules["vllm.triton_utils"] = triton_utils
        worker = "vllm.v1.worker.gpu"
        sampler = importlib.import_module(f"{worker}.spec_decode.rejection_sampler_utils")
        gumbel = importlib.import_module(f"{worker}.sample.gumbel")
    finally:
        _forget_vllm()
        sys.modules.update(saved)
    return sampler.rejection_sample, gumbel.apply_temperature, gumbel.gumbel_sample


def _forget_vllm() -> dict[str, types.ModuleType]:
    return {n: sys.modules.pop(n) for n in list(sys.modules) if n.split(".")[0] == "vllm"}
