"""Imported by the fork server: what every engine's process needs, done once."""

import contextlib
import gc
import importlib
import warnings

from support import triton_cpu

# Before vLLM is imported.
triton_cpu.prepare_vllm()

from triton.runtime import cache  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

# With what vLLM imports while an engine starts.
MODULES = (
    "compressed_tensors",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.fused_moe.oracle.nvfp4",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.utils.jit_monitor",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu.model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu.model_states.default",
    "vllm_hsd.host.cascade_sampler",
    "vllm_hsd.host.cpu_warm_up",
    "vllm_hsd.host.grammar_drafts",
    "vllm_hsd.host.host_speculator",
    "vllm_hsd.host.program_models",
    "vllm_hsd.host.replacements",
    "vllm_hsd.host.spec_config",
    "vllm_hsd.host.speculator",
    "vllm_hsd.host.stock_config",
    "vllm_hsd.host.vllm_names",
)

for module in MODULES:
    # Releases differ in their modules.
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(module)

if current_platform.is_cpu():
    # C++ in the place of Triton kernels: half a second of looking through all modules.
    with warnings.catch_warnings(action="ignore"):
        current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    # A process that imports vLLM for each class of models that a user's cache does not describe:
    # no CUDA is to be kept from this one.
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()

# A third of a second for each engine, which finds it done.
with contextlib.suppress(ImportError):
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())

# The hash of all of Triton, which it keeps: half a second.
cache.triton_key()

# vLLM collects garbage nine times at start-up; most of that time would go to imported modules.
gc.freeze()
