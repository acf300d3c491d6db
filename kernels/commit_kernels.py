"""The kernels that append to drafts, tokens and rows; cascade/cascade_steps.py launches them.

One program copies a chunk of a request's rows, the first one also writes all else that belongs to
it. No program of a launch reads what another one of the same launch writes: what the copies of rows
need is left unchanged by the launch that makes them.
"""

import triton
import triton.language as tl

from vllm_hsd.kernels.blocks import is_finite, without_filtered
from vllm_hsd.kernels.step_kernels import (
    ACCEPTED,
    DRAFTED,
    INVALID,
    ROUNDS,
    add_count,
    at_level,
    request_below,
)


@triton.jit(do_not_specialize=["rows"])
def commit_verify_kernel(
    rows_ptr,  # [B, N, V]
    lse_ptr,  # float32 [B, N]
    window_ptr,  # int32 [B, capacity]
    window_stride,
    end_ptr,  # int32 [B]
    start_ptr,  # int32 [L, B]
    drafted_ptr,
    requested_ptr,
    level_stride,
    lengths_ptr,  # int32 [L]
    counts_ptr,  # int64 [L, 4]
    origin_ptr,  # int32 [B]
    temperature_ptr,  # float32 [B]
    token_ptr,  # int64 [B, DRAFT + 1]
    accepted_ptr,  # int32 [B]
    emitted_ptr,  # int32 [B]
    target_lse_ptr,  # float32 [B, DRAFT + 1]
    threshold_ptr,  # float32 [B, rows]
    logits_ptr,  # [B * rows, V]
    logits_stride,
    vocab_size,
    rows,  # of logits of each request, at most DRAFT + 1
    LEVEL: tl.constexpr,
    DRAFT: tl.constexpr,
    LANES: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    origin = tl.load(origin_ptr + request)
    own = at_level(LEVEL, level_stride, request)
    if origin >= 0:
        emitted = tl.load(emitted_ptr + request)
        temperature = tl.load(temperature_ptr + request)
        if temperature > 0:
            entry = chunk * CHUNK + tl.arange(0, CHUNK)
            first_row = logits_ptr + request * rows * logits_stride
            first_place = rows_ptr + (request * N + origin) * vocab_size
            for r in range(0, emitted):
                x = tl.load(first_row + r * logits_stride + entry, mask=entry < vocab_size)
                threshold = tl.load(threshold_ptr + request * rows + r)
                x = without_filtered(x, temperature, threshold)
                tl.store(first_place + r * vocab_size + entry, x, mask=entry < vocab_size)
        if chunk == 0:
            accepted = tl.load(accepted_ptr + request)
            begin = tl.load(start_ptr + own) + origin
            if emitted > accepted:
                token = tl.load(token_ptr + request * (DRAFT + 1) + accepted).to(tl.int32)
                place = request * window_stride + begin + accepted
                tl.store(window_ptr + place, token)
            lane = tl.arange(0, LANES)
            lse = tl.load(
                target_lse_ptr + request * (DRAFT + 1) + lane, mask=lane < emitted, other=0.0
            )
            tl.store(lse_ptr + request * N + origin + lane, lse, mask=lane < emitted)
            drafted = origin + emitted
            end = begin + emitted
            tl.store(end_ptr + request, end)
            tl.store(drafted_ptr + own, drafted)
            below = tl.load(drafted_ptr + at_level(LEVEL - 1, level_stride, request))
            add_count(counts_ptr, LEVEL - 1, DRAFTED, below)
            add_count(counts_ptr, LEVEL - 1, ROUNDS, (below > 0).to(tl.int32))
            add_count(counts_ptr, LEVEL - 1, ACCEPTED, accepted)
            invalid = tl.sum((is_finite(lse) == 0).to(tl.int32), axis=0)
            add_count(counts_ptr, LEVEL, INVALID, invalid + accepted + 1 - emitted)
            room = tl.load(requested_ptr + own) - drafted - 1
            drafts = start_ptr, drafted_ptr, requested_ptr, level_stride
            # All warps have read `below`, which one of them clears.
            tl.debug_barrier()
            request_below(drafts, lengths_ptr, request, end, room, LEVEL)


@triton.jit(do_not_specialize=["step"])
def commit_unverified_kernel(
    rows_ptr,  # [B, N, V]
    lse_ptr,  # float32 [B, N]
    window_ptr,  # int32 [B, capacity]
    window_stride,
    end_ptr,  # int32 [B]
    start_ptr,  # int32 [L, B]
    drafted_ptr,
    requested_ptr,
    level_stride,
    lengths_ptr,  # int32 [L]
    counts_ptr,  # int64 [L, 4]
    origin_ptr,  # int32 [B]
    temperature_ptr,  # float32 [B]
    below_rows_ptr,  # [B, BELOW, V], with HAS_ROWS
    below_lse_ptr,  # float32 [B, BELOW]
    taken_ptr,  # int32 [B], tokens of the draft from below
    token_ptr,  # int64 [B]
    token_lse_ptr,  # float32 [B]
    threshold_ptr,  # float32 [B]
    logits_ptr,  # [B, V]
    logits_stride,
    vocab_size,
    step,  # of a draft op, with LEVEL = 0
    HAS_ROWS: tl.constexpr,  # False: what is below are point masses
    ADDS: tl.constexpr,  # False: the level draws no token of its own
    BELOW: tl.constexpr,
    LEVEL: tl.constexpr,
    LANES: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    own = at_level(LEVEL, level_stride, request)
    if LEVEL > 0:
        origin, taken = tl.load(origin_ptr + request), tl.load(taken_ptr + request)
    else:
        # There is nothing below.
        origin, taken = tl.where(step < tl.load(requested_ptr + own), step, -1), 0
    if origin >= 0:
        begin = tl.load(start_ptr + own) + origin
        window_ptr += request * window_stride
        temperature = tl.load(temperature_ptr + request)
        if temperature > 0:
            entry = chunk * CHUNK + tl.arange(0, CHUNK)
            first_place = rows_ptr + (request * N + origin) * vocab_size
            for i in range(0, taken):
                if HAS_ROWS:
                    row_ptr = below_rows_ptr + (request * BELOW + i) * vocab_size
                    x = tl.load(row_ptr + entry, mask=entry < vocab_size)
                else:
                    is_token = entry == tl.load(window_ptr + begin + i)
                    x = tl.where(is_token, 0.0, float("-inf")).to(rows_ptr.dtype.element_ty)
                tl.store(first_place + i * vocab_size + entry, x, mask=entry < vocab_size)
            if ADDS:
                x = tl.load(logits_ptr + request * logits_stride + entry, mask=entry < vocab_size)
                x = without_filtered(x, temperature, tl.load(threshold_ptr + request))
                tl.store(first_place + taken * vocab_size + entry, x, mask=entry < vocab_size)
        if chunk == 0:
            lane = tl.arange(0, LANES)
            passed_on = lane < taken
            place = request * N + origin + lane
            lse = tl.zeros([LANES], tl.float32)
            if HAS_ROWS:
                lse = tl.load(below_lse_ptr + request * BELOW + lane, mask=passed_on, other=0.0)
            tl.store(lse_ptr + place, lse, mask=passed_on)
            drafted = origin + taken
            if ADDS:
                token_lse = tl.load(token_lse_ptr + request)
                tl.store(lse_ptr + request * N + drafted, token_lse)
                token = tl.load(token_ptr + request).to(tl.int32)
                tl.store(window_ptr + begin + taken, token)
                drafted += 1
                end = begin + taken + 1
                tl.store(end_ptr + request, end)
                add_count(counts_ptr, LEVEL, INVALID, (is_finite(token_lse) == 0).to(tl.int32))
                room = tl.load(requested_ptr + own) - drafted - 1
                drafts = start_ptr, drafted_ptr, requested_ptr, level_stride
                request_below(drafts, lengths_ptr, request, end, room, LEVEL)
            tl.store(drafted_ptr + own, drafted)
