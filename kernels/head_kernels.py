"""The inputs of an EAGLE-3 head's passes; cascade/head_steps.py launches the kernels.

A head has an entry for each position: entry e reads token e + 1 and the state of position e, and
its logits are of token e + 2. One program writes what belongs to a request.
"""

import triton
import triton.language as tl

from vllm_hsd.kernels.step_kernels import place_in_cache


@triton.jit
def next_tokens_kernel(
    input_ids_ptr,  # int32 [T]
    index_ptr,  # [num_reqs]
    query_start_ptr,  # int32 [num_reqs + 1], of the target's step
    step_positions_ptr,  # int64 [T]
    text_ptr,  # int32 [max_num_reqs, max_model_len]
    text_stride,
    length_ptr,  # int32 [max_num_reqs]
    CHUNK: tl.constexpr,
):
    """For every token of a step of the target the one after it; any one where there is none."""
    request = tl.program_id(0)
    slot = tl.load(index_ptr + request).to(tl.int64)
    begin = tl.load(query_start_ptr + request)
    count = tl.load(query_start_ptr + request + 1) - begin
    lane = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    position = tl.load(step_positions_ptr + begin + lane, mask=lane < count, other=0)
    last = tl.maximum(tl.load(length_ptr + slot).to(tl.int64) - 1, 0)
    following = tl.minimum(position + 1, last)
    token = tl.load(text_ptr + slot * text_stride + following, mask=lane < count, other=0)
    tl.store(input_ids_ptr + begin + lane, tl.maximum(token, 0), mask=lane < count)


@triton.jit(do_not_specialize=["num_reqs", "max_model_len"])
def read_step_kernel(
    input_ids_ptr,  # int32 [B * QUERY]
    positions_ptr,  # int64 [B * QUERY]
    seq_lens_ptr,  # int32 [B]
    query_start_ptr,  # int32 [B + 1]
    slot_mapping_ptr,  # int64 [G, B * QUERY]
    slot_mapping_stride,
    source_ptr,  # int64 [B * QUERY]
    last_ptr,  # int64 [B]
    index_ptr,  # [num_reqs]
    step_start_ptr,  # int32 [num_reqs + 1], of the target's step
    step_positions_ptr,  # int64 [T]
    text_ptr,  # int32 [max_num_reqs, max_model_len]
    text_stride,
    length_ptr,  # int32 [max_num_reqs]
    table_ptrs_ptr,  # uint64 [G]
    table_strides_ptr,  # int64 [G]
    block_sizes_ptr,  # int32 [G]
    num_reqs,
    max_model_len,
    QUERY: tl.constexpr,
    LANES: tl.constexpr,
):
    """QUERY entries of each request that hold the last ones whose states a step has computed.

    They may go on after the text, where nothing is written and nothing before them looks.
    """
    request = tl.program_id(0)
    group = tl.program_id(1)
    real = request < num_reqs
    slot = tl.load(index_ptr + request, mask=real, other=0).to(tl.int64)
    begin = tl.load(step_start_ptr + request, mask=real, other=0)
    count = tl.load(step_start_ptr + request + 1, mask=real, other=0) - begin
    first = tl.load(step_positions_ptr + begin, mask=real, other=0)
    # Of a prompt that is read in chunks, no more than what the step has reached.
    length = tl.load(length_ptr + slot, mask=real, other=0).to(tl.int64)
    length = tl.minimum(length, first + count + 1)
    lowest = tl.minimum(tl.maximum(first, length - 1 - QUERY), max_model_len - QUERY)
    lowest = tl.maximum(lowest, 0)
    lane = tl.arange(0, LANES)
    fed = lane < QUERY
    entry = lowest + lane
    known = fed & real & (entry + 1 < length)
    place = request * QUERY + lane
    if group == 0:
        token = tl.load(text_ptr + slot * text_stride + entry + 1, mask=known, other=0)
        tl.store(input_ids_ptr + place, tl.maximum(token, 0), mask=fed)
        tl.store(positions_ptr + place, tl.where(real, entry, 0), mask=fed)
        of_step = tl.minimum(tl.maximum(entry - first, 0), tl.maximum(count - 1, 0))
        tl.store(source_ptr + place, (begin + of_step).to(tl.int64), mask=fed)
        last = tl.minimum(tl.maximum(length - 2 - lowest, 0), QUERY - 1)
        tl.store(last_ptr + request, request * QUERY + last)
        tl.store(seq_lens_ptr + request, tl.where(real, lowest + QUERY, 0).to(tl.int32))
        tl.store(query_start_ptr + request, tl.minimum(request, num_reqs) * QUERY)
        batch = tl.num_programs(0)
        if request == batch - 1:
            tl.store(query_start_ptr + batch, tl.minimum(batch, num_reqs) * QUERY)
    written = known & (entry >= first)
    where = place_in_cache(
        table_ptrs_ptr, table_strides_ptr, block_sizes_ptr, group, slot, entry, written
    )
    tl.store(slot_mapping_ptr + group * slot_mapping_stride + place, where, mask=fed)


@triton.jit(do_not_specialize=["back", "max_model_len"])
def place_entry_kernel(
    input_ids_ptr,  # int32 [B]
    positions_ptr,  # int64 [B]
    seq_lens_ptr,  # int32 [B]
    query_start_ptr,  # int32 [B + 1]
    slot_mapping_ptr,  # int64 [G, B]
    slot_mapping_stride,
    reads_ptr,  # int64 [B]
    writes_ptr,  # int64 [B]
    num_reqs_ptr,  # int32 [1]
    window_ptr,  # int32 [B, capacity]
    window_stride,
    base_ptr,  # int64 [B]
    end_ptr,  # int32 [B]
    drafted_ptr,  # int32 [B], of the top level
    requested_ptr,
    limit_ptr,  # int64 [B]
    slot_ptr,  # int32 [B]
    table_ptrs_ptr,  # uint64 [G]
    table_strides_ptr,  # int64 [G]
    block_sizes_ptr,  # int32 [G]
    back,
    max_model_len,
    WINDOW: tl.constexpr,
    STATES: tl.constexpr,
):
    """The entry that reads the token `back` places before a text's last one.

    A request has STATES states: what the entry of its last committed token reads, what those of
    drafted tokens read, and at the end one that nothing reads. The entry reads one and leaves the
    next.
    """
    request = tl.program_id(0)
    group = tl.program_id(1)
    real = request < tl.load(num_reqs_ptr)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    index = tl.load(end_ptr + request) - 1 - back
    position = tl.load(base_ptr + request) + index - 1
    entry = tl.minimum(tl.maximum(position, 0), max_model_len - 1)
    if group == 0:
        token = tl.load(window_ptr + request * window_stride + tl.maximum(index, 0))
        tl.store(input_ids_ptr + request, tl.maximum(token, 0))
        tl.store(positions_ptr + request, entry)
        tl.store(seq_lens_ptr + request, tl.where(real, entry + 1, 0).to(tl.int32))
        number = index - (WINDOW - 1)
        state = request.to(tl.int64) * STATES
        tl.store(reads_ptr + request, state + tl.maximum(number, 0))
        # Earlier entries have read the target's states, which are not there any more.
        tl.store(writes_ptr + request, state + tl.where(number >= 0, number + 1, STATES - 1))
        num_reqs = tl.load(num_reqs_ptr)
        tl.store(query_start_ptr + request, tl.minimum(request, num_reqs))
        batch = tl.num_programs(0)
        if request == batch - 1:
            tl.store(query_start_ptr + batch, tl.minimum(batch, num_reqs))
    running = tl.load(drafted_ptr + request) < tl.load(requested_ptr + request)
    written = running & (slot >= 0) & (index >= WINDOW) & (position <= tl.load(limit_ptr + request))
    where = place_in_cache(
        table_ptrs_ptr, table_strides_ptr, block_sizes_ptr, group, slot, entry, written
    )
    tl.store(slot_mapping_ptr + group * slot_mapping_stride + request, where)
