"""Verification of several drawn drafts of each request on the layout of vLLM's V2 runner.

A request's inputs are R rows of N tokens, each after a root of its own. They become one tree of
R * N nodes, row after row, of which ``tree_verify`` gets copies of the logits: a token that rows
draw after the same tokens is listed once for each of them, with its children below the first.
Launch 1 finds the tree, launch 2 copies, two more verify.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_hsd.kernels.blocks import (
    NUM_WARPS,
    check_logits,
    check_vector,
    padded_size,
    tile_shape,
    without_filtered,
)
from vllm_hsd.kernels.tree_verify import MAX_NODES, verify_tree

_INTEGERS = (torch.int64, torch.int32)


class DrawnResult(NamedTuple):
    """What the rows of B requests come to.

    Attributes:
        token_ids: int64 [B, N + 1], the accepted tokens and the one after them, then -1.
        num_accepted: int32 [B].
        num_emitted: int32 [B], see `tree_verify.TreeResult`.
        winner: int32 [B], the first row that begins with the accepted tokens.
    """

    token_ids: torch.Tensor
    num_accepted: torch.Tensor
    num_emitted: torch.Tensor
    winner: torch.Tensor


@triton.jit
def tree_of_rows_kernel(
    token_out_ptr,  # int64 [B, ROWS * N], -1 in an empty slot
    parent_out_ptr,  # int64 [B, ROWS * N]
    token_ptr,  # [num_logits], the input token of each row of logits
    cu_ptr,  # [B + 1]
    held_ptr,  # int32 [B, ROWS]
    ROWS: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,  # of the nodes
):
    request = tl.program_id(0)
    index = tl.arange(0, LANES)
    row, place = index // N, index % N
    token_ptr += tl.load(cu_ptr + request)
    held_ptr += request * ROWS
    inside = index < ROWS * N
    held = tl.load(held_ptr + row, mask=inside, other=0)
    valid = inside & (place < held)
    first = token_ptr + row * (N + 1) + 1
    token = tl.load(first + place, mask=valid, other=-1).to(tl.int64)
    parent = tl.full([LANES], -1, tl.int64)
    # The first row wins that begins with all tokens before the node; its own row always does.
    for i in range(ROWS):
        other = ROWS - 1 - i
        length = tl.load(held_ptr + other)
        same = (valid & (row >= other)).to(tl.int32)
        for at in range(N):
            theirs = tl.load(token_ptr + other * (N + 1) + 1 + at, mask=at < length, other=-2)
            mine = tl.load(first + at, mask=valid & (at < place), other=-1)
            same = tl.where((at < place) & (mine != theirs), 0, same)
        parent = tl.where((same > 0) & (place > 0), other * N + place - 1, parent)
    tl.store(token_out_ptr + request * (ROWS * N) + index, token, mask=inside)
    tl.store(parent_out_ptr + request * (ROWS * N) + index, parent, mask=inside)


@triton.jit(do_not_specialize=["entries"])
def gather_rows_kernel(
    target_out_ptr,  # [B, ROWS * N + 1, V]
    draft_out_ptr,  # [B, ROWS * N + 1, V]
    node_token_ptr,  # int64 [B, ROWS * N]
    parent_ptr,  # int64 [B, ROWS * N]
    target_ptr,  # [num_logits, V]
    target_stride,
    cu_ptr,  # [B + 1]
    temperature_ptr,  # float32 [B]
    threshold_ptr,  # float32 [num_logits], with FILTERED
    chain_ptr,  # [D, N, V], what the first row was drawn from
    further_ptr,  # [ROWS - 1, D', N, V], and the others
    entries,  # D'
    draft_index_ptr,  # [B], entry of D and D'
    vocab_size,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,
    FILTERED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    node = tl.program_id(1) - 1  # -1 is the root
    request = tl.program_id(2).to(tl.int64)
    nodes: tl.constexpr = ROWS * N
    index = tl.arange(0, LANES)
    inside = index < nodes
    token = tl.load(node_token_ptr + request * nodes + index, mask=inside, other=-1)
    parent = tl.load(parent_ptr + request * nodes + index, mask=inside, other=-2)
    child = tl.min(tl.where((parent == node) & (token >= 0), index, nodes), axis=0)
    entry = chunk * CHUNK + tl.arange(0, CHUNK)
    place = (request * (nodes + 1) + node + 1) * vocab_size
    # A token that its parent drew before is not accepted, nor has it children.
    at = request * nodes + tl.maximum(node, 0)
    own_token, own_parent = tl.load(node_token_ptr + at), tl.load(parent_ptr + at)
    twin = (index < node) & (token == own_token) & (parent == own_parent)
    may_end = (node >= 0) & (own_token >= 0) & (tl.sum(twin.to(tl.int32), axis=0) == 0)
    if may_end | (child < nodes):
        input = tl.where(node < 0, 0, node // N * (N + 1) + node % N + 1)
        input += tl.load(cu_ptr + request).to(tl.int64)
        x = tl.load(target_ptr + input * target_stride + entry, mask=entry < vocab_size)
        if FILTERED:
            threshold = tl.load(threshold_ptr + input)
            x = without_filtered(x, tl.load(temperature_ptr + request), threshold)
        tl.store(target_out_ptr + place + entry, x, mask=entry < vocab_size)
    if child < nodes:
        # Its children were drawn from one distribution, whichever of them is asked.
        row = child // N
        draft = tl.load(draft_index_ptr + request).to(tl.int64)
        # One pointer for both would not be known to be aligned.
        if row == 0:
            at = (draft * N + child % N) * vocab_size
            x = tl.load(chain_ptr + at + entry, mask=entry < vocab_size)
            tl.store(draft_out_ptr + place + entry, x, mask=entry < vocab_size)
        else:
            at = (((row - 1) * entries + draft) * N + child % N) * vocab_size
            x = tl.load(further_ptr + at + entry, mask=entry < vocab_size)
            tl.store(draft_out_ptr + place + entry, x, mask=entry < vocab_size)


def verify_drawn_rows(
    target_logits: torch.Tensor,
    chain_logits: torch.Tensor,
    further_logits: torch.Tensor,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    held: torch.Tensor,
    draft_index: torch.Tensor,
    temperature: torch.Tensor,
    draft_temperature: torch.Tensor,
    seeds: torch.Tensor,
    draws: torch.Tensor,
    *,
    level: int = 1,
    thresholds: torch.Tensor | None = None,
) -> DrawnResult:
    """Verify rows that were drawn independently of each other, in their order.

    Nothing is read on the host. A request without a token in any row gets a result that means
    nothing. A row may be shorter, or empty, by all that was drawn for rows before it, not by its
    own tokens or those of later ones.

    Args:
        target_logits: [num_logits, V], the target's after each input.
        chain_logits: [D, N, V], contiguous, what the first row of each draft was drawn from.
        further_logits: [R - 1, D', N, V], contiguous, what its other rows were drawn from.
        draft_sampled: int64 or int32 [num_logits], the inputs: of each request R times a root and N
            tokens, of which the last ones may be missing.
        cu_num_logits: int64 or int32 [B + 1].
        held: int32 [B, R], tokens of each row that are looked at.
        draft_index: int64 or int32 [B], entry of D and D' that belongs to each request.
        temperature: float32 [B], above 0.
        draft_temperature: float32 [B], above 0.
        seeds: int64 [B].
        draws: int64 [B]; a call uses the draws .. draws + R * N.
        level: see `tree_verify.verify_tree`.
        thresholds: float32 [num_logits] of ``row_thresholds`` for the target's rows. Draft rows
            hold -inf for what they cannot draw.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; names the argument.
    """
    device, (batch, rows) = target_logits.device, held.shape
    check_logits("target_logits", target_logits, 2)
    _, length, vocab_size = chain_logits.shape
    shape = rows - 1, further_logits.shape[1], length, vocab_size
    for name, logits in (("chain_logits", chain_logits), ("further_logits", further_logits)):
        check_logits(name, logits, logits.ndim)
        if not logits.is_contiguous() or logits.dtype != chain_logits.dtype:
            raise ValueError(f"{name} must be contiguous {chain_logits.dtype}.")
    if further_logits.shape != shape or target_logits.shape[1] != vocab_size:
        raise ValueError(
            f"further_logits must be {list(shape)} and target_logits have {vocab_size} columns, "
            f"got {list(further_logits.shape)} and {target_logits.shape[1]}."
        )
    nodes = rows * length
    if rows < 2 or nodes > MAX_NODES:
        raise ValueError(f"R must be at least 2 and R * N at most {MAX_NODES}, got {nodes}.")
    check_vector("draft_sampled", draft_sampled, target_logits.shape[0], _INTEGERS, device)
    check_vector("cu_num_logits", cu_num_logits, batch + 1, _INTEGERS, device)
    check_vector("held", held.reshape(-1), batch * rows, (torch.int32,), device)
    check_vector("draft_index", draft_index, batch, _INTEGERS, device)
    check_vector("temperature", temperature, batch, (torch.float32,), device)
    if thresholds is not None:
        check_vector("thresholds", thresholds, len(target_logits), (torch.float32,), device)
    # Apart: each begins at whole 16 bytes, for any batch.
    tokens, parents = (
        torch.empty(batch, nodes, dtype=torch.int64, device=device) for _ in range(2)
    )
    target = target_logits.new_empty(batch, nodes + 1, vocab_size)
    draft = chain_logits.new_empty(batch, nodes + 1, vocab_size)
    sizes = {"ROWS": rows, "N": length, "LANES": padded_size(nodes)}
    chunk, _, chunks = tile_shape(vocab_size)
    if batch:
        tree_of_rows_kernel[(batch,)](
            tokens, parents, draft_sampled, cu_num_logits, held, num_warps=1, **sizes
        )
        gather_rows_kernel[(chunks, nodes + 1, batch)](
            target,
            draft,
            tokens,
            parents,
            target_logits,
            target_logits.stride(0),
            cu_num_logits,
            temperature,
            temperature if thresholds is None else thresholds,
            chain_logits,
            further_logits,
            further_logits.shape[1],
            draft_index,
            vocab_size,
            FILTERED=thresholds is not None,
            CHUNK=chunk,
            num_warps=NUM_WARPS,
            **sizes,
        )
    found = verify_tree(
        target,
        draft,
        tokens,
        parents,
        temperature,
        seeds,
        draws,
        level=level,
        draft_temperature=draft_temperature,
    )
    last = found.path.gather(1, (found.num_accepted.long() - 1).clamp(min=0)[:, None])[:, 0]
    winner = torch.where(found.num_accepted > 0, last // length, 0).to(torch.int32)
    # A path is no longer than a row.
    token_ids = found.token_ids[:, : length + 1].contiguous()
    return DrawnResult(token_ids, found.num_accepted, found.num_emitted, winner)
