"""Checks of proposals while they run: a CUDA graph keeps the addresses that it was captured with.

Between two steps vLLM may hand over the same values in other memory. So `stage` copies what a
proposal needs, and what runs after it uses memory that never moves.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

# Set to 1: every proposal runs without its graph first, where no operation may use a tensor that
# the runner handed over; then its graph must draft the same tokens. Slow; for the search of faults.
VARIABLE = "VLLM_HSD_CHECK_GRAPHS"


def enabled() -> bool:
    """Whether the user asks for the checks."""
    return os.environ.get(VARIABLE) == "1"


class GraphError(RuntimeError):
    """A proposal cannot run as a CUDA graph, or its graph drafts something else."""


class _Watch(TorchDispatchMode):
    def __init__(self, foreign: dict[int, str]) -> None:
        super().__init__()
        self.foreign = foreign

    def check(self, name: str, arguments: Any) -> None:
        """Raise if an argument lies in a foreign tensor's memory."""
        for tensor in tree_leaves(arguments):
            if isinstance(tensor, torch.Tensor):
                found = self.foreign.get(tensor.untyped_storage().data_ptr())
                if found is not None:
                    raise GraphError(
                        f"{name} reads {found} of the runner, whose address changes: `stage` "
                        "must copy it before the proposal."
                    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.check(str(func), (args, kwargs))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_foreign_reads(foreign: dict[str, Any], but: torch.Tensor) -> Iterator[None]:
    """Raise `GraphError` where an operation or a Triton kernel uses a foreign tensor.

    Args:
        foreign: name -> tensor, or an object whose attributes are searched for tensors.
        but: a tensor among them that may be used.
    """
    addresses = _by_address(foreign)
    addresses.pop(but.untyped_storage().data_ptr(), None)
    watch = _Watch(addresses)
    # Triton launches kernels past torch's dispatcher.
    launchers = {JITFunction: JITFunction.run, InterpretedFunction: InterpretedFunction.run}

    def watched(run):
        def launch(self, *args, **kwargs):
            watch.check(self.fn.__name__, (args, kwargs))
            return run(self, *args, **kwargs)

        return launch

    try:
        for kind, run in launchers.items():
            kind.run = watched(run)
        with watch:
            yield
    finally:
        for kind, run in launchers.items():
            kind.run = run


def _by_address(foreign: dict[str, Any]) -> dict[int, str]:
    found = {}
    for name, value in foreign.items():
        parts = {name: value}
        if not isinstance(value, torch.Tensor):
            parts = {f"{name}.{key}": part for key, part in vars(value).items()}
        for part_name, part in parts.items():
            # vLLM keeps some tensors with a copy on the host.
            tensor = getattr(part, "gpu", part)
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                found[tensor.untyped_storage().data_ptr()] = part_name
    return found
