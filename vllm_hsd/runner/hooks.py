"""Registry of every vLLM name that the V2 runner's part replaces, changes or overrides.

`vllm_names.py` lists what subclasses override. See `vllm_hsd.registry`.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_hsd import shared_hooks
from vllm_hsd.registry import Registry

# Modules whose import fills the registry, in the order in which their replacements are made.
_MODULES = (
    "vllm_names",
    "replacements",
    "metrics",
    "adaptive",
    "branches",
    "draft_lengths",
    "cpu_warm_up",
    "sampler",
    "shared_outputs",
    "stock_drafters",
    "levels",
    "graphs",
    "graph_checks",
    "speculator",
)

RUNNER = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"

REGISTRY = Registry("vllm_hsd.runner", _MODULES, shared_hooks.REGISTRY)
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
