"""CUDA graphs of whole proposals, one for every program and batch size of short lists.

vLLM captures them with its own, at start-up and once more when it profiles memory. What runs in a
graph is `cascade.program.Program.run`, the same code that runs without one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

logger = logging.getLogger(__name__)


def limit_batches(manager: CudaGraphManager, tokens: int, largest: int) -> None:
    """Leave out the graphs of more than `largest` requests that have so many tokens each.

    vLLM runs such steps as others for which it has none.
    """
    every = [each for found in manager._capture_descs.values() for each in found]
    ours = {each.num_reqs or 0 for each in every if each.uniform_token_count == tokens}
    left_out = {size for size in ours if size > largest}
    for found in (*manager._capture_descs.values(), *manager._candidates.values()):
        found[:] = [
            each
            for each in found
            if each.uniform_token_count != tokens or each.num_reqs not in left_out
        ]
    if left_out:
        logger.warning(
            "Steps in which %d tokens of each request are verified are CUDA graphs for batches of "
            "%s, not of %s: attention has room for max_num_seqs=%d rows.",
            tokens,
            sorted(ours - left_out),
            sorted(left_out),
            manager.max_num_reqs,
        )


def batch_sizes(max_batch_size: int) -> list[int]:
    """Powers of two up to a batch size, from 16 on also their middles, and that size.

    A graph has a node for every kernel of all forward passes, so few sizes are captured and
    batches are padded to the next one.
    """
    powers = [1 << i for i in range(max_batch_size.bit_length())]
    middles = [size + size // 2 for size in powers if size >= 16]
    return sorted({s for s in (*powers, *middles) if s < max_batch_size} | {max_batch_size})


def why_eager(
    cudagraph_mode: CUDAGraphMode, levels: Sequence[Any], longest_query: int
) -> str | None:
    """Why proposals cannot run as CUDA graphs; None if they can.

    Args:
        cudagraph_mode: of the target.
        levels: those that run forward passes.
        longest_query: tokens that one request feeds to a forward pass at most.
    """
    if cudagraph_mode.decode_mode() != CUDAGraphMode.FULL:
        return f"cudagraph_mode is {cudagraph_mode.name}"
    for level in levels:
        if level.enforce_eager:
            return f"levels[{level.index}].enforce_eager is set"
        for group in (group for groups in level.groups for group in groups):
            backend = group.backend.get_name()
            if not group.supports_draft_decode_metadata_update:
                return f"the attention backend {backend} plans its work on the host"
            support = group.get_metadata_builder(0).get_cudagraph_support(
                level.vllm_config, group.kv_cache_spec
            )
            needed = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
            if longest_query > 1:
                needed = AttentionCGSupport.UNIFORM_BATCH
            if support.value < needed.value:
                return (
                    f"the attention backend {backend} cannot capture {longest_query} tokens "
                    "for each request"
                )
    return None


class Proposal(NamedTuple):
    """What tells the programs of one cascade apart.

    Attributes:
        length: most tokens.
        every_pass: False where a model next to lookups runs its first passes alone, or one that
            draws several drafts draws the chains alone.
    """

    length: int
    every_pass: bool = True


class ProposalGraphs(CudaGraphManager):
    """Captured proposals; vLLM drops them after it has profiled memory.

    Args:
        sizes: batch sizes, ascending.
        proposals: all programs.
        limits: most requests of programs that are not for all sizes.
    """

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        sizes: Sequence[int],
        proposals: Sequence[Proposal],
        limits: Mapping[Proposal, int] | None = None,
    ) -> None:
        self.sizes, self.proposals = list(sizes), list(proposals)
        self.limits = limits or {}
        super().__init__(vllm_config, device, CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=1)

    def _init_candidates(self) -> None:
        # One batch size is captured for several programs, which descriptors must tell apart.
        self.descriptors = {
            (size, proposal): BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.FULL,
                num_tokens=size,
                num_reqs=size,
                uniform_token_count=1,
                max_query_len=number,
            )
            for size in self.sizes
            for number, proposal in enumerate(self.proposals, 1)
            if size <= self.limits.get(proposal, size)
        }
        self.keys = {descriptor: key for key, descriptor in self.descriptors.items()}
        # The largest first: the others find their memory in its pool.
        self._capture_descs = {CUDAGraphMode.FULL: list(self.descriptors.values())[::-1]}

    def capture_all(self, prepare: Callable[[int, Proposal], Callable[[], None]]) -> None:
        """Capture a graph for every batch size and program.

        Args:
            prepare: makes the state of a batch size and a program, all of it padding, and what
                attention needs; runs outside the graph, once before the warm-up and once before
                the capture. It returns what is captured.
        """

        def create_forward_fn(desc, warmup):
            run = prepare(*self.keys[desc])
            return lambda cg_mode: run()

        self.capture(create_forward_fn, "Capturing proposals of the cascade")

    def size_for(self, batch: int, proposal: Proposal) -> int | None:
        """The smallest batch size that is captured and holds a batch, None if there is none."""
        keys = ((size, proposal) for size in self.sizes if size >= batch)
        return next((key[0] for key in keys if self.descriptors.get(key) in self.graphs), None)

    def replay(self, size: int, proposal: Proposal) -> None:
        """Run the program that was captured for a batch size, on what its state holds now."""
        self.run_fullgraph(self.descriptors[size, proposal])
