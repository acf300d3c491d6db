"""Registry of every vLLM name that the V1 runner's part replaces, changes or overrides.

Replacements register themselves with `@replaces` (one function or method of vLLM) or
`@replaces_on_runner` (a method of one model runner); `vllm_names.py` lists what subclasses
override. See `vllm_hsd.registry`.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_hsd import shared_hooks
from vllm_hsd.registry import (
    NONE_FILED,
    PLUGIN_ISSUE,
    TESTED,
    Hook,
    How,
    Registry,
    fault_of,
    in_place,
    installed_release,
    is_ours,
    resolve,
    version_fault,
)

__all__ = [
    "NONE_FILED",
    "PLUGIN_ISSUE",
    "TESTED",
    "Hook",
    "How",
    "fault_of",
    "in_place",
    "installed_release",
    "is_ours",
    "resolve",
    "version_fault",
]

# Modules whose import fills the registry, in the order in which their replacements are made.
_MODULES = (
    "vllm_names",
    "replacements",
    "on_runner",
    "spec_config",
    "proposer",
    "adaptive",
    "sampler",
    "branches",
    "levels",
    "eagle3",
    "build",
    "head_states",
    "stock_drafters",
)

RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
NO_PLUGIN_API = "vLLM has a plugin interface for drafters that run models on the V1 runner"
# A proposal for block verification on the V1 runner.
BLOCK_ISSUE = "vllm-project/vllm#40819"

REGISTRY = Registry("vllm_hsd.runner_v1", _MODULES, shared_hooks.REGISTRY)
HOOKS = REGISTRY.hooks
register = REGISTRY.register
replaces = REGISTRY.replaces
replaces_on_runner = REGISTRY.replaces_on_runner
install = REGISTRY.install
is_installed = REGISTRY.is_installed
place = REGISTRY.place
faults = REGISTRY.faults
load = REGISTRY.load


def install_on_runner(runner: Any, proposer: Any) -> None:
    """Replace the methods of one runner that `on_runner` registers."""
    for name, replacement in REGISTRY.replacements.items():
        if HOOKS[name].how == "on runner" and replacement.__module__.endswith(".on_runner"):
            replace_on(runner, name, by=proposer)


def replace_on(owner: Any, name: str, by: Any) -> None:
    """Replace a method of one object that is registered as "on runner".

    Args:
        owner: object of vLLM.
        name: registered name; the last part is the method's.
        by: first argument of the replacement after the replaced method.
    """
    attribute = name.rpartition(".")[2]
    bound = functools.partial(REGISTRY.replacements[name], getattr(owner, attribute))
    setattr(owner, attribute, functools.partial(bound, by))
