"""Branches of lookups on the device: which offers become rows, and where their rows are.

``vllm_hsd.cascade.row_layout`` says which blocks a row has; here rows share no token, each takes as
many inputs, N tokens after its root, and those that it does not need are computed for nothing.
budget/source_choice.py and host/branches.py launch the kernels.
"""

import triton
import triton.language as tl

from vllm_hsd.kernels.blocks import extract_lane
from vllm_hsd.kernels.source_kernels import best_offer, slot_of


@triton.jit
def choose_branches_kernel(
    branch_ptr,  # int32 [B, BRANCHES, N], their tokens
    branch_count_ptr,  # int32 [B, BRANCHES]
    window_ptr,  # int32 [B, capacity], with the chain
    window_stride,
    end_ptr,  # int32 [B]
    drafted_ptr,  # int32 [B], of level 0
    room_ptr,  # int32 [B], requested of level 0
    requested_ptr,  # int32 [B], of the top level
    slot_ptr,  # int32 [B]
    own_ptr,  # float64 [2, S, slots + 1]
    count_ptr,  # int32 [S, slots + 1]
    token_ptr,  # int32 [S, slots + 1, N]
    expected_ptr,  # float64 [S, slots + 1, N]
    prior_ptr,  # float64 [1]
    least_ptr,  # float64 [1]
    slots,
    SOURCES: tl.constexpr,
    BRANCHES: tl.constexpr,
    FIRSTS: tl.constexpr,  # lanes for the first tokens of all rows
    N: tl.constexpr,
    LANES: tl.constexpr,
):
    request = tl.program_id(0)
    slot = slot_of(slot_ptr, requested_ptr, request, slots)
    room = tl.load(room_ptr + request)
    offers = own_ptr, count_ptr, token_ptr, expected_ptr, prior_ptr, least_ptr
    lane, row = tl.arange(0, LANES), tl.arange(0, FIRSTS)
    drafted = tl.load(drafted_ptr + request)
    chain_ptr = window_ptr + request * window_stride + tl.load(end_ptr + request) - drafted
    firsts = tl.where(row == 0, tl.load(chain_ptr, mask=drafted > 0, other=-1), -1)
    for branch in tl.static_range(BRANCHES):
        _, count, taken = best_offer(offers, slot, slots, room, firsts, SOURCES, N, LANES)
        at = request * BRANCHES + branch
        tl.store(branch_ptr + at * N + lane, taken, mask=lane < N)
        tl.store(branch_count_ptr + at, count)
        first = tl.where(count > 0, extract_lane(taken, lane, 0), -1)
        firsts = tl.where(row == branch + 1, first, firsts)


@triton.jit(do_not_specialize=["length"])
def flat_drafts_kernel(
    out_ptr,  # int64 [B, (BRANCHES + 1) * (length + 1) - 1]
    out_stride,
    chain_ptr,  # int64 [B, length]
    branch_ptr,  # int32 [B, BRANCHES, length]
    branch_count_ptr,  # int32 [B, BRANCHES], cut to the room that their blocks have
    window_ptr,  # int32 [B, capacity]
    window_stride,
    base_ptr,  # int64 [B]
    chained_ptr,  # int32 [B], 1 for a request that has to do without branches
    block_size_ptr,  # int32 [G]
    groups,
    max_model_len,
    length,  # most tokens of a row
    WINDOW: tl.constexpr,
    BRANCHES: tl.constexpr,
    LANES: tl.constexpr,
):
    request = tl.program_id(0)
    lane = tl.arange(0, LANES)
    root = tl.load(window_ptr + request * window_stride + WINDOW - 1)
    position = tl.load(base_ptr + request) + WINDOW - 1
    room = tl.where(tl.load(chained_ptr + request) > 0, 0, length).to(tl.int64)
    for group in range(groups):
        size = tl.load(block_size_ptr + group)
        blocks = (length + size - 1) // size + (size < 8 * length).to(tl.int32)
        # vLLM reserves nothing past max_model_len.
        behind = (position + length) // size + 1 + BRANCHES * blocks
        own = tl.where(behind * size <= max_model_len, blocks * size - 1 - position % size, 0)
        room = tl.minimum(room, own)
    out_ptr += request.to(tl.int64) * out_stride
    chain = tl.load(chain_ptr + request * length + lane, mask=lane < length, other=0)
    tl.store(out_ptr + lane, chain, mask=lane < length)
    for branch in tl.static_range(BRANCHES):
        at = request * BRANCHES + branch
        count = tl.minimum(tl.load(branch_count_ptr + at), room.to(tl.int32))
        tl.store(branch_count_ptr + at, count)
        token = tl.load(
            branch_ptr + at * length + lane - 1, mask=(lane > 0) & (lane <= count), other=0
        )
        token = tl.where(lane > 0, token, root).to(tl.int64)
        tl.store(out_ptr + (branch + 1) * (length + 1) - 1 + lane, token, mask=lane <= length)


@triton.jit(do_not_specialize=["length"])
def lay_out_kernel(
    position_ptr,  # int64 [tokens], of the chain's; and of the branches' afterwards
    slot_mapping_ptr,  # int64 [tokens], the same
    table_out_ptr,  # int32 [rows, width], block ids of every row
    table_out_stride,
    seq_len_ptr,  # int32 [rows]
    chain_ptr,  # int32 [rows], see `copy_blocks.BranchRows`
    base_ptr,  # int64 [rows]
    count_ptr,  # int32 [B, BRANCHES + 1], inputs of each row that hold
    request_ptr,  # int32 [rows]
    branch_ptr,  # int32 [rows]
    start_ptr,  # int32 [rows], first token in the batch
    tokens_ptr,  # int32 [rows]
    index_ptr,  # int64 [B], slots
    row_of_slot_ptr,  # int32 [max_num_reqs]
    branch_count_ptr,  # int32 [proposals, BRANCHES]
    table_ptr,  # int32 [B, width]
    table_stride,
    block_size,
    length,  # most tokens of a row after its root
    FIRST: tl.constexpr,  # also what does not depend on the KV-cache group
    BRANCHES: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    request = tl.load(request_ptr + row)
    branch = tl.load(branch_ptr + row)
    start = tl.load(start_ptr + row)
    tokens = tl.load(tokens_ptr + row)
    slot = tl.load(index_ptr + request)
    root = tl.load(position_ptr + start - branch * (length + 1))
    drafted = tl.load(row_of_slot_ptr + slot, mask=branch > 0, other=-1)
    count = tl.load(branch_count_ptr + drafted * BRANCHES + branch - 1, mask=drafted >= 0, other=0)
    count = tl.where(count > 0, tl.minimum(count + 1, tokens), 0)
    lane = tl.arange(0, LANES)
    if FIRST:
        tl.store(seq_len_ptr + row, (root + tokens).to(tl.int32))
        tl.store(base_ptr + row, root)
        tl.store(chain_ptr + row, tl.where((branch == 0) | (count > 0), row - branch, -1))
        own = tl.where(branch == 0, tl.minimum(tokens, length + 1), count)
        tl.store(count_ptr + request * (BRANCHES + 1) + branch, own)
        inside = (lane < tokens) & (branch > 0)
        tl.store(position_ptr + start + lane, root + lane, mask=inside)
    table_ptr += request.to(tl.int64) * table_stride
    first = root // block_size
    blocks = (length + block_size - 1) // block_size + (block_size < 8 * length).to(tl.int32)
    shift = (root + length) // block_size + 1 + (branch - 1) * blocks - first
    shift = tl.where(count > 0, shift, 0)
    last = (root + tokens - 1) // block_size
    for begin in range(0, last + 1, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        # What a branch computes for nothing past its own blocks is read from the chain's.
        private = (index >= first) & (index <= (root + count - 1) // block_size)
        block = tl.load(table_ptr + index + tl.where(private, shift, 0), mask=index <= last)
        out_ptr = table_out_ptr + row.to(tl.int64) * table_out_stride
        tl.store(out_ptr + index, block, mask=index <= last)
    if branch > 0:
        position = root + lane
        at = table_ptr + position // block_size + shift
        block = tl.load(at, mask=lane < count, other=0).to(tl.int64)
        where = tl.where(lane < count, block * block_size + position % block_size, -1)
        tl.store(slot_mapping_ptr + start + lane, where, mask=lane < tokens)
