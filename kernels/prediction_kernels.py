"""The lowest level's drafts from a predicted text; cascade/prediction_lookup.py launches them.

Their rule is stated there. One program compares a chunk of the predicted text with the end of a
request's text, the other takes the best place and copies what follows it.
"""

import triton
import triton.language as tl

from vllm_hsd.kernels.blocks import times
from vllm_hsd.kernels.texts import matched_tokens

# Columns of the facts of a request's prediction.
COUNT, BEGIN, PLACE, AT, FACTS = (tl.constexpr(i) for i in range(5))
# Of a key: the match in the upper half, the rank of its place in the lower.
LAST_RANK = tl.constexpr(0xFFFFFFFF)


@triton.jit
def find_place_kernel(
    best_ptr,  # int64 [B, CHUNKS], length of the match << 32 | (LAST_RANK - rank of its place)
    window_ptr,  # int32 [B, capacity]
    window_stride,
    base_ptr,  # int64 [B]
    end_ptr,  # int32 [B]
    requested_ptr,  # int32 [B], of level 0
    slot_ptr,  # int32 [B]
    text_ptr,  # int32 [max_num_reqs, max_model_len]
    text_stride,
    predicted_ptr,  # int32 [max_num_reqs, width]
    width,
    fact_ptr,  # int32 [max_num_reqs, FACTS]
    LONGEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0)
    chunk = tl.program_id(1)
    wanted = tl.load(requested_ptr + request) > 0
    slot = tl.load(slot_ptr + request).to(tl.int64)
    fact_ptr += slot * FACTS
    count = tl.load(fact_ptr + COUNT, mask=wanted, other=0)
    position = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    key = tl.zeros([CHUNK], tl.int64)
    if chunk * CHUNK < count:
        base = tl.load(base_ptr + request)
        length = base + tl.load(end_ptr + request)
        # The answer is matched, not the prompt before it.
        most = tl.minimum(length - tl.load(fact_ptr + BEGIN), LONGEST)
        window_ptr += request * window_stride
        text_ptr += slot * text_stride
        predicted_ptr += slot * width
        going = position < count
        matched = matched_tokens(
            window_ptr, text_ptr, base, length, position, going, most, CHUNK, predicted_ptr
        )
        last = tl.load(fact_ptr + PLACE).to(tl.int64)
        place = position + 1
        later = tl.where(place >= last, 1 + place - last, 2 + width + last - place)
        rank = tl.where(place == last + length - tl.load(fact_ptr + AT), 0, later)
        key = tl.where(matched > 0, (matched.to(tl.int64) << 32) | (LAST_RANK - rank), 0)
    tl.store(best_ptr + request * tl.num_programs(1) + chunk, tl.max(key, axis=0))


@triton.jit
def copy_predicted_kernel(
    token_ptr,  # int32 [B, N]
    count_ptr,  # int32 [B]
    confidence_ptr,  # float64 [B, N]
    window_ptr,  # int32 [B, capacity]
    window_stride,
    base_ptr,  # int64 [B]
    end_ptr,  # int32 [B]
    committed_ptr,  # int32 [B], tokens of the window that are committed
    drafted_ptr,  # int32 [B], of level 0
    requested_ptr,  # int32 [B]
    slot_ptr,  # int32 [B]
    predicted_ptr,  # int32 [max_num_reqs, width]
    width,
    fact_ptr,  # int32 [max_num_reqs, FACTS]
    best_ptr,  # int64 [B, chunks]
    chunks,
    doubt_ptr,  # float64 [1]
    N: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    request = tl.program_id(0)
    c = tl.arange(0, CHUNKS)
    best = tl.max(tl.load(best_ptr + request * chunks + c, mask=c < chunks, other=0), axis=0)
    matched = best >> 32
    found = matched > 0
    rank = LAST_RANK - (best & LAST_RANK)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    fact_ptr += slot * FACTS
    base = tl.load(base_ptr + request)
    end = tl.load(end_ptr + request)
    length = base + end
    last = tl.load(fact_ptr + PLACE, mask=found, other=0).to(tl.int64)
    place = tl.where(rank <= width + 1, last + rank - 1, last + 2 + width - rank)
    followed = last + length - tl.load(fact_ptr + AT, mask=found, other=0)
    place = tl.where(rank == 0, followed, place)
    left = tl.load(fact_ptr + COUNT, mask=found, other=0) - place
    count = tl.minimum(tl.load(requested_ptr + request).to(tl.int64), left)
    count = tl.where(found, count, 0).to(tl.int32)
    lane = tl.arange(0, LANES)
    taken = lane < count
    token = tl.load(predicted_ptr + slot * width + place + lane, mask=taken, other=0)
    tl.store(window_ptr + request * window_stride + end + lane, token, mask=taken)
    tl.store(end_ptr + request, end + count)
    tl.store(drafted_ptr + request, count)
    each = matched.to(tl.float64) / (matched.to(tl.float64) + tl.load(doubt_ptr))
    sure = tl.associative_scan(tl.zeros([LANES], tl.float64) + each, 0, times)
    row = request.to(tl.int64) * N + lane
    tl.store(token_ptr + row, token, mask=lane < N)
    tl.store(confidence_ptr + row, tl.where(taken, sure, 0.0), mask=lane < N)
    tl.store(count_ptr + request, count)
    # What is drafted above the committed text may be refused.
    if found & (end == tl.load(committed_ptr + request)):
        tl.store(fact_ptr + PLACE, place.to(tl.int32))
        tl.store(fact_ptr + AT, length.to(tl.int32))
