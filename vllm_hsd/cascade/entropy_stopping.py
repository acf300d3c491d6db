"""Entropy-based stopping on the device: `tools.reference.stopping` as data of a fixed schedule.

A draft that has ended keeps nothing more until the level above asks for the next one. Its passes
run all the same. Nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.cascade.schedule import Draft, Verify
from vllm_hsd.kernels.blocks import NUM_WARPS, padded_size, tile_shape
from vllm_hsd.kernels.chain_verify import ChainResult
from vllm_hsd.kernels.entropy_kernels import (
    entropy_stats_kernel,
    observe_target_kernel,
    stop_kernel,
)


class DeviceThresholds:
    """Thresholds of L levels and S request slots, and the entropies of drafts of B requests.

    Args:
        stopping: for each level, whether its drafts end by entropy.
        state: of the longest drafts.

    Attributes:
        total: float64 [L, S], sums of the entropies at rejected tokens, in nats.
        count: int32 [L, S], how many there were.
        entropy: per level, float32 [B, n] of the rows that the tokens of its draft were drawn from;
            NaN where their level drafts fixed lengths.
        drafter: per level, int32 [B, n], the level that drafted each token.
    """

    def __init__(self, stopping: Sequence[bool], state: ProposalState) -> None:
        self.stopping, device = list(stopping), state.end.device
        shape = len(self.stopping), len(state.row_of_slot)
        self.total = torch.zeros(shape, dtype=torch.float64, device=device)
        self.count = torch.zeros(shape, dtype=torch.int32, device=device)
        self.entropy = [torch.zeros_like(lse) for lse in state.lse]
        self.drafter = [torch.zeros_like(lse, dtype=torch.int32) for lse in state.lse]

    def forget(self, slots: torch.Tensor) -> None:
        """Forget these requests: int64 [n]."""
        self.total.index_fill_(1, slots, 0.0)
        self.count.index_fill_(1, slots, 0)


def end_unsure_drafts(
    thresholds: DeviceThresholds,
    state: ProposalState,
    op: Draft | Verify,
    logits: torch.Tensor,
    result: ChainResult | None = None,
) -> None:
    """Let the drafts of a level end with what an op adds to them, where the level is unsure of it.

    Runs before the op's tokens are committed, and moves the thresholds of the levels below.

    Args:
        thresholds: of the requests.
        state: of which `requested` becomes what is drafted where a draft ends.
        op: the op.
        logits: [B * r, V] rows that its r tokens for each request are drawn from.
        result: of a verification; None where the draft from below is passed on.
    """
    level, measured = op.level, thresholds.stopping[op.level]
    chunk, _, chunks = tile_shape(logits.shape[1])
    rows = len(logits) if measured else 0
    stats = torch.empty(3, rows, chunks, dtype=torch.float32, device=logits.device)
    if measured:
        entropy_stats_kernel[(rows * chunks,)](
            stats,
            rows * chunks,
            logits,
            logits.stride(0),
            chunks,
            logits.shape[1],
            CHUNK=chunk,
            num_warps=NUM_WARPS,
        )
    _stop(
        thresholds,
        state,
        level,
        max(level - 1, 0),
        stats,
        op.step if isinstance(op, Draft) else 0,
        None if result is None else (result.num_accepted, result.num_emitted),
        passes_on=isinstance(op, Verify) and result is None,
        lanes=op.draft_length + 1 if isinstance(op, Verify) else 1,
    )


def pass_entropies_on(thresholds: DeviceThresholds, state: ProposalState) -> None:
    """Before level 0's draft becomes part of the top level's, let its entropies become so."""
    top, lanes = len(thresholds.stopping) - 1, thresholds.entropy[0].shape[1]
    none = thresholds.total.new_empty(3, 0, 1, dtype=torch.float32)
    _stop(thresholds, state, top, 0, none, 0, None, passes_on=True, lanes=lanes, adds=False)


def _stop(
    thresholds: DeviceThresholds,
    state: ProposalState,
    level: int,
    feeder: int,
    stats: torch.Tensor,
    step: int,
    verdict: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    passes_on: bool,
    lanes: int,
    adds: bool = True,
) -> None:
    _, rows, chunks = stats.shape
    stop_kernel[(state.batch,)](
        thresholds.entropy[level],
        thresholds.drafter[level],
        thresholds.entropy[feeder],
        thresholds.drafter[feeder],
        thresholds.total,
        thresholds.count,
        thresholds.count.shape[1],
        state.drafted,
        state.requested,
        state.drafted.stride(0),
        state.origin,
        state.slot,
        *(verdict or (state.origin, state.origin)),
        stats,
        rows * chunks,
        chunks,
        step,
        VERIFIES=verdict is not None,
        PASSES_ON=passes_on,
        MEASURED=rows > 0,
        LEVEL=level,
        FEEDER=feeder,
        ADDS=adds,
        N=thresholds.entropy[level].shape[1],
        BELOW=thresholds.entropy[feeder].shape[1],
        ROWS=rows // state.batch,
        LANES=padded_size(lanes),
        CHUNKS=padded_size(chunks),
        num_warps=1,
    )


def observe_target(
    thresholds: DeviceThresholds,
    state: ProposalState,
    *,
    index: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
) -> None:
    """Take in what the target has rejected of the last proposal, before the next one is staged.

    Args:
        thresholds: of the requests.
        state: as the last proposal left it.
        index: int32 [num_reqs], request slots of the batch.
        num_sampled: int32 [num_reqs], tokens that each request has sampled in this step.
        num_rejected: int32 [num_reqs], tokens that it was fed in vain.
    """
    observe_target_kernel[(len(index),)](
        thresholds.entropy[-1],
        thresholds.drafter[-1],
        thresholds.total,
        thresholds.count,
        thresholds.count.shape[1],
        state.row_of_slot,
        state.draft_length,
        index,
        num_sampled,
        num_rejected,
        N=thresholds.entropy[-1].shape[1],
        num_warps=1,
    )
