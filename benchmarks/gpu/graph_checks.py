"""Checks of proposals while they run: a CUDA graph keeps the addresses that it was captured with.

Between two steps vLLM may hand over the same values in other memory. So `stage` copies what a
proposal needs, and what runs after it uses memory that never moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from vllm_hsd.budget.source_choice import SourcesLookup
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.host.graphs import Proposal
from vllm_hsd.host.speculator import CascadeSpeculator


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


def watch(speculator: CascadeSpeculator) -> None:
    """From now on every proposal runs without its graph first, where no operation may use a tensor
    that the runner hands over; then its graph must draft the same tokens. Slow.

    Proposals raise GraphError where that does not hold.
    """
    propose, stage = speculator.propose, speculator._stage
    handed_over: dict[str, Any] = {}

    def proposed(input_batch: Any, *args: Any, **keys: Any) -> Any:
        handed_over["the batch"] = input_batch
        return propose(input_batch, *args, **keys)

    def staged(state: ProposalState, schedule: Any, *inputs: Any) -> Any:
        handed_over["inputs"] = inputs
        return stage(state, schedule, *inputs)

    replaced = {
        "propose": proposed,
        "_stage": staged,
        "_run": partial(_run_checked, speculator, handed_over),
        # Steps without drafts are read as where no graph is.
        "_keep_up": lambda *_: False,
    }
    vars(speculator).update(replaced)


def _run_checked(
    speculator: CascadeSpeculator,
    handed_over: dict[str, Any],
    state: ProposalState,
    proposal: Proposal,
    size: int | None,
) -> None:
    """Draft without a graph, on nothing that the runner hands over; then with the graph."""
    inputs, program = handed_over["inputs"], speculator.programs[proposal]
    foreign = {"the batch": handed_over["the batch"], "num_sampled": inputs[1]}
    foreign |= {"the table of requests": speculator.req_states, **speculator.parameters.tensors()}
    changed, real = [state.counts], len(inputs[0])
    if speculator.thresholds is not None:
        changed += [speculator.thresholds.total, speculator.thresholds.count]
    if isinstance(speculator.lookup, SourcesLookup):
        changed += [each for each in vars(speculator.lookup).values() if torch.is_tensor(each)]
    before = [tensor.clone() for tensor in changed]
    # Lookups search the text in place: its memory does not move.
    with no_foreign_reads(foreign, but=speculator.req_states.all_token_ids.gpu):
        program.run(state)
    if size is None:
        return
    drafted = state.draft_tokens[:real].clone()
    speculator._stage(state, program.schedule, *inputs)
    for tensor, was in zip(changed, before, strict=True):
        tensor.copy_(was)
    speculator._replay(size, proposal)
    replayed = state.draft_tokens[:real]
    if not drafted.equal(replayed):
        raise GraphError(
            f"the CUDA graph for {size} requests drafts {replayed.tolist()}, the same proposal "
            f"without a graph {drafted.tolist()}."
        )


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
