"""The registry of every vLLM name that is replaced, changed or overridden.

`host.read_config` adds the function that reads configurations. Importing this module imports
nothing of vLLM.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_hsd.host.registry import Registry

# Modules whose import fills the registry.
_MODULES = (
    "engine_hooks",
    "request_keys",
    "forced_tokens",
    "grammar_drafts",
    "metrics",
    "vllm_names",
    "replacements",
    "device_counts",
    "branches",
    "draft_lengths",
    "cpu_warm_up",
    "sampler",
    "stock_drafters",
    "program_models",
    "graphs",
    "speculator",
)

RUNNER = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"

REGISTRY = Registry("vllm_hsd.host", _MODULES)
HOOKS = REGISTRY.hooks
install = REGISTRY.install


def replace_on(owner: Any, *names: str, by: Any) -> None:
    """Replace methods of one object that are registered as "on runner".

    Args:
        owner: object of vLLM.
        names: registered names; the last part is the method's.
        by: first argument of the replacements after the replaced method.
    """
    for name in names:
        attribute = name.rpartition(".")[2]
        replacement = REGISTRY.replacements[name]
        setattr(owner, attribute, functools.partial(replacement, getattr(owner, attribute), by))
