"""The lowest level's drafts from n-grams and token pairs; cascade/lookups.py launches them."""

import triton
import triton.language as tl

from vllm_hsd.kernels.texts import matched_tokens, token_at


@triton.jit
def find_ngram_kernel(
    best_ptr,  # int64 [B, CHUNKS], length of the match << 32 | (2**32 - 1 - where it ends)
    window_ptr,  # int32 [B, capacity]
    window_stride,
    base_ptr,  # int64 [B]
    end_ptr,  # int32 [B]
    requested_ptr,  # int32 [B], of level 0
    slot_ptr,  # int32 [B]
    text_ptr,  # int32 [max_num_reqs, max_model_len]
    text_stride,
    LONGEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0)
    chunk = tl.program_id(1)
    base = tl.load(base_ptr + request)
    length = base + tl.load(end_ptr + request)
    position = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    matched = tl.zeros([CHUNK], tl.int32)
    wanted = (tl.load(requested_ptr + request) > 0) & (chunk * CHUNK < length - 1)
    if wanted:
        window_ptr += request * window_stride
        text_ptr += tl.load(slot_ptr + request).to(tl.int64) * text_stride
        matched = matched_tokens(
            window_ptr, text_ptr, base, length, position, position < length - 1, LONGEST, CHUNK
        )
    key = tl.where(matched > 0, (matched.to(tl.int64) << 32) | (0xFFFFFFFF - position), 0)
    tl.store(best_ptr + request * tl.num_programs(1) + chunk, tl.max(key, axis=0))


@triton.jit
def copy_ngram_kernel(
    window_ptr,  # int32 [B, capacity]
    window_stride,
    base_ptr,  # int64 [B]
    end_ptr,  # int32 [B]
    drafted_ptr,  # int32 [B], of level 0
    requested_ptr,  # int32 [B]
    slot_ptr,  # int32 [B]
    text_ptr,  # int32 [max_num_reqs, max_model_len]
    text_stride,
    best_ptr,  # int64 [B, CHUNKS]
    chunks,
    SHORTEST: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    request = tl.program_id(0)
    c = tl.arange(0, CHUNKS)
    best = tl.max(tl.load(best_ptr + request * chunks + c, mask=c < chunks, other=0), axis=0)
    base = tl.load(base_ptr + request)
    end = tl.load(end_ptr + request)
    found = (best >> 32) >= SHORTEST
    first = 0xFFFFFFFF - (best & 0xFFFFFFFF) + 1
    lane = tl.arange(0, LANES)
    count = tl.minimum(tl.load(requested_ptr + request).to(tl.int64), base + end - first)
    count = tl.where(found, count, 0)
    taken = lane < count
    at = first + lane
    window_ptr += request * window_stride
    text_ptr += tl.load(slot_ptr + request).to(tl.int64) * text_stride
    token = token_at(window_ptr, text_ptr, base, at, taken)
    tl.store(window_ptr + end + lane, token, mask=taken)
    tl.store(end_ptr + request, end + count.to(tl.int32))
    tl.store(drafted_ptr + request, count.to(tl.int32))


@triton.jit
def lookup_bigram_kernel(
    window_ptr,  # int32 [B, capacity]
    window_stride,
    end_ptr,  # int32 [B]
    drafted_ptr,  # int32 [B], of level 0
    requested_ptr,  # int32 [B]
    successor_ptr,  # int32 [V]
):
    request = tl.program_id(0)
    requested = tl.load(requested_ptr + request)
    end = tl.load(end_ptr + request)
    window_ptr += request * window_stride
    token = tl.load(window_ptr + end - 1)
    count = tl.zeros((), tl.int32)
    while (count < requested) & (token >= 0):
        token = tl.load(successor_ptr + token)
        if token >= 0:
            tl.store(window_ptr + end + count, token)
            count += 1
    tl.store(end_ptr + request, end + count)
    tl.store(drafted_ptr + request, count)
