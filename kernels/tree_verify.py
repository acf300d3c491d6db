"""Traversal verification of one small draft tree per request, on logits, in 2 launches.

The rule is that of ``vllm_hsd.rules.verify_tree`` with method "traversal" (Weng et al.,
"Traversal Verification for Speculative Tree Decoding", arXiv:2505.12398; rules/tree.py says how
it relates). README.md in this directory says how a node's residual is rebuilt from two rows.
Launch 1 reads the rows that have children, launch 2 walks each tree with one program.
"""

from typing import NamedTuple

import torch
import triton

from vllm_hsd.kernels.blocks import NUM_WARPS, check_logits, check_vector, padded_size, tile_shape
from vllm_hsd.kernels.rng import stream_of
from vllm_hsd.kernels.tree_kernels import node_stats_kernel, traverse_kernel
from vllm_hsd.rules import MAX_KERNEL_NODES

MAX_NODES = MAX_KERNEL_NODES
_INTEGERS = (torch.int64, torch.int32)


class TreeResult(NamedTuple):
    """Result of tree verification for B requests.

    Attributes:
        token_ids: int64 [B, N + 1], tokens of the accepted nodes and the one after them, then -1.
        path: int64 [B, N], numbers of the accepted nodes, then -1.
        num_accepted: int32 [B], accepted nodes.
        num_emitted: int32 [B], emitted tokens: num_accepted + 1, or num_accepted where the target
            row after the last accepted node is invalid.
    """

    token_ids: torch.Tensor
    path: torch.Tensor
    num_accepted: torch.Tensor
    num_emitted: torch.Tensor


def verify_tree(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    draws: torch.Tensor,
    *,
    level: int = 1,
    draft_temperature: torch.Tensor | None = None,
) -> TreeResult:
    """Verify draft trees; the emitted tokens follow softmax(target / temperature).

    Siblings were drawn independently of each other. Nothing is read on the host: nodes whose token
    is negative or outside the vocabulary are skipped. An invalid row (a NaN or +inf in it, or only
    -inf) ends its branch, as in ``vllm_hsd.rules.verify_tree``. If it is the root's, nothing is
    accepted and token 0 is emitted, as by vLLM without speculation (see ``chain_verify``).

    Args:
        target_logits: [B, N + 1, V] bfloat16, float16 or float32, contiguous; row 0 is the
            target's at the root, row i + 1 its row after node i. N is at most 64.
        draft_logits: like target_logits, row i + 1 the proposal row at node i, from which the
            children of that node were drawn (rows of leaves are not read).
        tokens: int64 or int32 [B, N] in draw order, -1 in an empty slot. A token that one parent
            drew twice is listed twice, with its children below the first.
        parents: int64 or int32 [B, N], the parent's number, -1 for the root.
        temperature: float32 [B] of the target, above 0.
        seeds: int64 [B], request seeds.
        draws: int64 [B], the request's counter; a call uses the draws .. draws + N.
        level: the verifying level, whose uniforms are used; 0 only drafts.
        draft_temperature: float32 [B], above 0, at which the nodes were drawn; the target's by
            default.

    Returns:
        TreeResult on the device of target_logits.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; names the argument.
    """
    check_logits("target_logits", target_logits, 3)
    batch, rows, vocab_size = target_logits.shape
    nodes = rows - 1
    device = target_logits.device
    if not 1 <= nodes <= MAX_NODES:
        raise ValueError(f"target_logits must have 2 to {MAX_NODES + 1} rows a tree, got {rows}.")
    for name, logits in (("target_logits", target_logits), ("draft_logits", draft_logits)):
        check_logits(name, logits, 3)
        if logits.shape != target_logits.shape or not logits.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous {list(target_logits.shape)} tensor, got "
                f"{list(logits.shape)}."
            )
    for name, ids in (("tokens", tokens), ("parents", parents)):
        if ids.shape != (batch, nodes):
            raise ValueError(f"{name} must have shape [{batch}, {nodes}], got {list(ids.shape)}.")
        check_vector(name, ids.reshape(-1), batch * nodes, _INTEGERS, device)
    if draft_temperature is None:
        draft_temperature = temperature
    check_vector("temperature", temperature, batch, (torch.float32,), device)
    check_vector("draft_temperature", draft_temperature, batch, (torch.float32,), device)
    check_vector("seeds", seeds, batch, (torch.int64,), device)
    check_vector("draws", draws, batch, (torch.int64,), device)

    stream = stream_of(level, lowest=1)
    token_ids = torch.empty(batch, nodes + 1, dtype=torch.int64, device=device)
    path = torch.empty(batch, nodes, dtype=torch.int64, device=device)
    counts = torch.empty(2, batch, dtype=torch.int32, device=device)
    result = TreeResult(token_ids, path, counts[0], counts[1])
    if batch == 0:
        return result
    chunk, block, chunks = tile_shape(vocab_size)
    stats = torch.empty(4, batch, rows, chunks, dtype=torch.float32, device=device)
    state = torch.empty(batch, 5, rows, dtype=torch.float32, device=device)
    mass = torch.empty(batch, chunks, chunk // block, dtype=torch.float32, device=device)
    shared = {"NODES": nodes, "LANES": triton.next_power_of_2(nodes), "CHUNK": chunk}
    node_stats_kernel[(chunks, rows, batch)](
        stats,
        stats[0].numel(),
        target_logits,
        draft_logits,
        tokens,
        parents,
        temperature,
        draft_temperature,
        vocab_size,
        num_warps=NUM_WARPS,
        **shared,
    )
    traverse_kernel[(batch,)](
        token_ids,
        path,
        counts,
        state,
        mass,
        stats,
        stats[0].numel(),
        target_logits,
        draft_logits,
        tokens,
        parents,
        temperature,
        draft_temperature,
        seeds,
        draws,
        stream,
        vocab_size,
        chunks,
        ROWS=padded_size(rows),
        BLOCK=block,
        CHUNKS=padded_size(chunks),
        num_warps=NUM_WARPS,
        **shared,
    )
    return result
