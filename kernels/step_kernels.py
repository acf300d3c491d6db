"""The kernels between the forward passes of a proposal, but for those that append to drafts.

One program writes what belongs to a request. cascade/cascade_steps.py launches them.
"""

import triton
import triton.language as tl

# Of `ProposalState.counts`.
DRAFTED, ACCEPTED, ROUNDS, INVALID, COLUMNS = (tl.constexpr(i) for i in range(5))


@triton.jit
def at_level(level, level_stride, request):
    """Offset of a request in an [L, B] buffer."""
    return level * level_stride + request


@triton.jit
def add_count(counts_ptr, level, column: tl.constexpr, number):
    if number > 0:
        tl.atomic_add(counts_ptr + level * COLUMNS + column, number.to(tl.int64), sem="relaxed")


@triton.jit
def place_in_cache(
    table_ptrs_ptr, table_strides_ptr, block_sizes_ptr, group, slot, position, written
):
    """Places of a request's positions in the KV cache of a group, -1 where nothing is written."""
    table_ptr = tl.load(table_ptrs_ptr + group).to(tl.pointer_type(tl.int32))
    table_stride = tl.load(table_strides_ptr + group)
    block_size = tl.load(block_sizes_ptr + group)
    # Past its row lies the next request's.
    written = written & (position // block_size < table_stride)
    block_ptr = table_ptr + slot * table_stride + position // block_size
    block = tl.load(block_ptr, mask=written, other=0).to(tl.int64)
    return tl.where(written, block * block_size + position % block_size, -1)


@triton.jit
def request_below(drafts, lengths_ptr, request, end, room, LEVEL: tl.constexpr):
    """Open new drafts of all levels below LEVEL, which has `room` for tokens from below.

    `drafts`: start, drafted and requested of all levels, and their stride.
    """
    start_ptr, drafted_ptr, requested_ptr, level_stride = drafts
    for i in tl.static_range(LEVEL):
        requested = tl.minimum(tl.load(lengths_ptr + LEVEL - 1 - i), tl.maximum(room, 0))
        at = at_level(LEVEL - 1 - i, level_stride, request)
        tl.store(start_ptr + at, end)
        tl.store(drafted_ptr + at, 0)
        tl.store(requested_ptr + at, requested)
        room = requested - 1


@triton.jit(do_not_specialize=["num_reqs"])
def stage_kernel(
    num_reqs_ptr,  # int32 [1]
    window_ptr,  # int32 [B, capacity]
    window_stride,
    base_ptr,  # int64 [B]
    end_ptr,  # int32 [B]
    start_ptr,  # int32 [L, B]
    drafted_ptr,
    requested_ptr,
    level_stride,
    lengths_ptr,  # int32 [L]
    limit_ptr,  # int64 [B]
    slot_ptr,  # int32 [B]
    temperature_ptr,  # float32 [L, B]
    temperature_stride,
    top_k_ptr,  # int32 [B]
    top_p_ptr,  # float32 [B]
    min_p_ptr,  # float32 [B]
    seed_ptr,  # int64 [B]
    draw_ptr,  # int64 [B]
    row_of_slot_ptr,  # int32 [max_num_reqs]
    counts_ptr,  # int64 [4], of the top level
    index_ptr,  # int32 [num_reqs]
    text_ptr,  # int32 [max_num_reqs, max_model_len]
    text_stride,
    length_ptr,  # int32 [max_num_reqs]
    num_sampled_ptr,  # int32 [num_reqs]
    request_temperature_ptr,  # float32 [max_num_reqs]
    request_top_k_ptr,  # int32 [max_num_reqs]
    request_top_p_ptr,  # float32 [max_num_reqs]
    request_min_p_ptr,  # float32 [max_num_reqs]
    request_seed_ptr,  # int64 [max_num_reqs]
    most_drafted_ptr,  # int32 [max_num_reqs]
    scale_ptr,  # float32 [L]
    num_reqs,
    max_model_len,
    DRAWS_PER_LENGTH: tl.constexpr,
    WINDOW: tl.constexpr,
    MARGIN: tl.constexpr,
    HORIZONTAL: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
):
    request = tl.program_id(0)
    in_batch = request < num_reqs
    slot = tl.load(index_ptr + request, mask=in_batch, other=-1).to(tl.int64)
    real = slot >= 0
    length = tl.load(length_ptr + slot, mask=real, other=0).to(tl.int64)
    sampled = tl.load(num_sampled_ptr + request, mask=real, other=0)
    drafts = real & (sampled > 0) & (length >= WINDOW)
    longest = tl.load(lengths_ptr + LEVELS - 1)
    room = tl.minimum(longest.to(tl.int64), max_model_len - MARGIN - length)
    most = tl.load(most_drafted_ptr + slot, mask=real, other=0)
    room = tl.minimum(room, tl.maximum(most - HORIZONTAL, 0))
    requested = tl.where(drafts, tl.maximum(room, 0), 0).to(tl.int32)
    base = tl.where(drafts, length - WINDOW, 0)
    lane = tl.arange(0, LANES)
    text = tl.load(
        text_ptr + slot * text_stride + base + lane, mask=drafts & (lane < WINDOW), other=0
    )
    tl.store(window_ptr + request * window_stride + lane, text, mask=lane < WINDOW)
    tl.store(base_ptr + request, base)
    tl.store(end_ptr + request, WINDOW)
    last = tl.minimum(length + longest + HORIZONTAL - 2, max_model_len - 1)
    # One that drafts nothing is read all the same: its blocks may serve a later request.
    last = tl.where(requested > 0, last, tl.minimum(length, max_model_len) - 1)
    tl.store(limit_ptr + request, tl.where(drafts, last, -1))
    tl.store(slot_ptr + request, slot.to(tl.int32))
    at = at_level(LEVELS - 1, level_stride, request)
    tl.store(start_ptr + at, WINDOW)
    tl.store(drafted_ptr + at, 0)
    tl.store(requested_ptr + at, requested)
    drafts_of_levels = start_ptr, drafted_ptr, requested_ptr, level_stride
    request_below(drafts_of_levels, lengths_ptr, request, WINDOW, requested - 1, LEVELS - 1)
    temperature = tl.load(request_temperature_ptr + slot, mask=real, other=0.0)
    for k in tl.static_range(LEVELS):
        scaled = temperature * tl.load(scale_ptr + k)
        tl.store(temperature_ptr + k * temperature_stride + request, scaled)
    tl.store(top_k_ptr + request, tl.load(request_top_k_ptr + slot, mask=real, other=0))
    tl.store(top_p_ptr + request, tl.load(request_top_p_ptr + slot, mask=real, other=1.0))
    tl.store(min_p_ptr + request, tl.load(request_min_p_ptr + slot, mask=real, other=0.0))
    tl.store(seed_ptr + request, tl.load(request_seed_ptr + slot, mask=real, other=0))
    tl.store(draw_ptr + request, length * DRAWS_PER_LENGTH)
    tl.store(row_of_slot_ptr + slot, request, mask=real)
    # What a step samples but for its last token, the target has accepted.
    add_count(counts_ptr, 0, ACCEPTED, sampled - 1)
    if request == 0:
        tl.store(num_reqs_ptr, num_reqs)


@triton.jit(do_not_specialize=["draft", "query"])
def place_kernel(
    input_ids_ptr,  # int32 [B * query]
    positions_ptr,  # int64 [B * query]
    seq_lens_ptr,  # int32 [B]
    query_start_ptr,  # int32 [B + 1]
    slot_mapping_ptr,  # int64 [G, B * query]
    slot_mapping_stride,
    sampled_ptr,  # int32 [B * (draft + 1)], with VERIFIES
    origin_ptr,  # int32 [B], with VERIFIES
    num_reqs_ptr,  # int32 [1]
    window_ptr,  # int32 [B, capacity]
    window_stride,
    base_ptr,  # int64 [B]
    end_ptr,  # int32 [B]
    start_ptr,  # int32 [L, B]
    drafted_ptr,
    requested_ptr,
    level_stride,
    limit_ptr,  # int64 [B]
    slot_ptr,  # int32 [B]
    table_ptrs_ptr,  # uint64 [G]
    table_strides_ptr,  # int64 [G]
    block_sizes_ptr,  # int32 [G]
    max_model_len,
    draft,  # draft length below, 0 for a draft op
    query,  # tokens of each request
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    VERIFIES: tl.constexpr,
    LANES: tl.constexpr,
    WINDOW: tl.constexpr,
    COMMITTED_TOO: tl.constexpr,  # False: leave the KV entries of all committed tokens but one
):
    request = tl.program_id(0)
    group = tl.program_id(1)
    num_reqs = tl.load(num_reqs_ptr)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    base = tl.load(base_ptr + request)
    text_end = tl.load(end_ptr + request)
    if VERIFIES:
        end = tl.load(start_ptr + at_level(LEVEL - 1, level_stride, request)) + draft
    else:
        end = text_end
    top = at_level(LEVELS - 1, level_stride, request)
    limit = tl.load(limit_ptr + request)
    running = tl.load(drafted_ptr + top) < tl.load(requested_ptr + top)
    # Up to the end of the text.
    running = running | (limit == base + WINDOW - 1)
    lane = tl.arange(0, LANES)
    fed = lane < query
    index = end - query + lane
    position = tl.minimum(tl.maximum(base + index, 0), max_model_len - 1)
    place = request * query + lane
    # Rows past the draft of a request repeat its last token; nothing is kept of them.
    known = tl.minimum(index, text_end - 1)
    # A pass as long as another request needs may begin before the window: nothing to write.
    inside = fed & (index >= 0)
    token = tl.load(window_ptr + request * window_stride + known, mask=inside, other=0)
    if group == 0:
        tl.store(input_ids_ptr + place, tl.maximum(token, 0), mask=fed)
        tl.store(positions_ptr + place, position, mask=fed)
        length = tl.minimum(base + end, max_model_len).to(tl.int32)
        tl.store(seq_lens_ptr + request, tl.where(request < num_reqs, length, 0))
        tl.store(query_start_ptr + request, tl.minimum(request, num_reqs) * query)
        batch = tl.num_programs(0)
        if request == batch - 1:
            tl.store(query_start_ptr + batch, tl.minimum(batch, num_reqs) * query)
        if VERIFIES:
            row = lane - (query - draft - 1)
            at = request * (draft + 1) + row
            tl.store(sampled_ptr + at, tl.maximum(token, 0), mask=fed & (row >= 0))
            own = at_level(LEVEL, level_stride, request)
            drafted = tl.load(drafted_ptr + own)
            has_room = drafted < tl.load(requested_ptr + own)
            tl.store(origin_ptr + request, tl.where(has_room, drafted, -1))
    written = inside & running & (slot >= 0) & (base + index <= limit)
    if not COMMITTED_TOO:
        written = written & (index >= WINDOW - 1)
    where = place_in_cache(
        table_ptrs_ptr, table_strides_ptr, block_sizes_ptr, group, slot, position, written
    )
    tl.store(slot_mapping_ptr + group * slot_mapping_stride + place, where, mask=fed)


@triton.jit
def collect_kernel(
    draft_tokens_ptr,  # int64 [B, LONGEST]
    draft_length_ptr,  # int32 [B]
    window_ptr,  # int32 [B, capacity]
    window_stride,
    end_ptr,  # int32 [B]
    drafted_ptr,  # int32 [B], of the top level
    counts_ptr,  # int64 [4], of the top level
    WINDOW: tl.constexpr,
    LONGEST: tl.constexpr,
    LANES: tl.constexpr,
):
    request = tl.program_id(0)
    drafted = tl.load(drafted_ptr + request)
    lane = tl.arange(0, LANES)
    index = tl.minimum(WINDOW + lane, tl.load(end_ptr + request) - 1)
    token = tl.load(window_ptr + request * window_stride + index)
    place = draft_tokens_ptr + request * LONGEST + lane
    tl.store(place, tl.maximum(token, 0).to(tl.int64), mask=lane < LONGEST)
    tl.store(draft_length_ptr + request, drafted)
    add_count(counts_ptr, 0, DRAFTED, drafted)
    add_count(counts_ptr, 0, ROUNDS, (drafted > 0).to(tl.int32))
