"""The two kernels of chain verification.

chain_verify.py launches them; README.md in this directory derives them.
"""

import triton
import triton.language as tl

from vllm_hsd.kernels.blocks import (
    argmax_of_chunks,
    block_masses,
    chunk_argmax,
    exp_shifted,
    extract_lane,
    inverse_cdf_index,
    inverse_temperature,
    load_kept,
    load_scaled,
    store_max_and_sum,
)
from vllm_hsd.kernels.chain_rule import (
    bound_acceptance,
    request_layout,
    residual_weight,
    store_residual_masses,
)


@triton.jit(do_not_specialize=["stats_stride", "position_skip"])
def row_stats_kernel(
    # Max and sum of exp(x - max) of the target's rows, and of the draft's; in the place of the sum
    # the argmax of a greedy row (T = 0) or of a coupled one's perturbed logits (T < 0).
    stats_ptr,  # float32 [4, B, K + 1, CHUNKS]
    stats_stride,  # B * (K + 1) * CHUNKS
    arrived_ptr,  # int32 [B]
    target_ptr,  # [num_logits, V]
    target_stride,
    draft_ptr,  # [D, K, V]
    draft_stride_origin,
    draft_stride_row,
    token_ptr,  # [num_logits]
    cu_ptr,  # [B + 1]
    index_ptr,  # [B] -> max_num_reqs
    draft_index_ptr,  # [B] -> D, -1 for none
    length_ptr,  # [D], with HAS_LENGTH
    temperature_ptr,  # float32 [max_num_reqs]
    draft_temperature_ptr,  # like temperature
    threshold_ptr,  # float32 [num_logits], with FILTERED
    seed_ptr,  # int64, like temperature, with COUPLED
    position_ptr,  # int64, with COUPLED
    position_skip,
    vocab_size,
    MAX_DRAFT: tl.constexpr,
    ROWS: tl.constexpr,
    READ_DRAFT: tl.constexpr,
    FILTERED: tl.constexpr,
    COUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    request = tl.program_id(2)
    if (chunk == 0) & (row == 0):
        tl.store(arrived_ptr + request, 0)
    layout = cu_ptr, index_ptr, draft_index_ptr, length_ptr, token_ptr
    state, target_row, draft_origin, length, _ = request_layout(
        layout, request, vocab_size, tl.arange(0, ROWS), MAX_DRAFT, HAS_LENGTH
    )
    temperature = tl.load(temperature_ptr + state)
    # Only a greedy request needs the row after its draft now: it may be the argmax to emit.
    if row < length + (temperature <= 0).to(tl.int32):
        threshold = float("-inf")
        if FILTERED:
            threshold = tl.load(threshold_ptr + target_row + row)
        seed, position = 0, 0
        if COUPLED:
            seed = tl.load(seed_ptr + state)
            # Before the verified inputs of each request lie `position_skip` others.
            at = target_row + row + (request + 1) * position_skip
            position = tl.load(position_ptr + at)
        entry = chunk * CHUNK + tl.arange(0, CHUNK)
        target_row_ptr = target_ptr + (target_row + row) * target_stride
        stats_ptr += (request * (MAX_DRAFT + 1) + row) * tl.num_programs(0) + chunk
        if temperature > 0:
            x = load_kept(target_row_ptr, entry, vocab_size, 1.0 / temperature, threshold)
            store_max_and_sum(stats_ptr, stats_stride, x)
        else:
            own = target_row_ptr, temperature, threshold, seed, position
            first = chunk * CHUNK
            maximum, index = chunk_argmax(own, first, vocab_size, COUPLED, CHUNK, BLOCK)
            tl.store(stats_ptr, maximum)
            tl.store(stats_ptr + stats_stride, index)
        if READ_DRAFT:
            draft_temperature = tl.load(draft_temperature_ptr + state)
            # A greedy target does not read the proposals, and one-hot proposals have no row.
            if (temperature > 0) & (draft_temperature > 0):
                draft_ptr += draft_origin * draft_stride_origin + row * draft_stride_row
                x = load_scaled(draft_ptr, entry, vocab_size, 1.0 / draft_temperature)
                store_max_and_sum(stats_ptr + 2 * stats_stride, stats_stride, x)


@triton.jit(do_not_specialize=["stats_stride", "stream", "draw_offset", "count_stride"])
def verify_kernel(
    out_ptr,  # int64 [B, K + 1], -1 after the emitted tokens (launch 3)
    count_ptr,  # int32 [2, >= B]: accepted; emitted (launch 3)
    row_lse_ptr,  # float32 [B, K + 1], of the target rows 0 .. accepted, NaN after (launch 3)
    mass_ptr,  # float32 [B, K + 1, CHUNKS, CHUNK / BLOCK], of residuals; of p after a whole draft
    stats_ptr,  # float32 [4, B, K + 1, CHUNKS], see row_stats_kernel
    stats_stride,  # B * (K + 1) * CHUNKS
    arrived_ptr,  # int32 [B]
    target_ptr,  # [num_logits, V]
    target_stride,
    draft_ptr,  # [D, K, V]
    draft_stride_origin,
    draft_stride_row,
    draft_lse_ptr,  # float32 [D, K]
    draft_lse_stride_origin,
    draft_lse_stride_row,
    token_ptr,  # [num_logits]
    cu_ptr,  # [B + 1]
    index_ptr,  # [B] -> max_num_reqs
    draft_index_ptr,  # [B] -> D, -1 for none
    length_ptr,  # [D], with HAS_LENGTH
    temperature_ptr,  # float32 [max_num_reqs]
    draft_temperature_ptr,  # like temperature
    threshold_ptr,  # float32 [num_logits], with FILTERED
    seed_ptr,  # int64, like temperature
    draw_ptr,  # int64, like temperature
    stream,
    draw_offset,
    vocab_size,
    count_stride,
    DECIDE: tl.constexpr,  # False: launch 2, residual masses; True: launch 3
    BLOCK_VERIFICATION: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    HAS_LSE: tl.constexpr,
    FILTERED: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    MAX_DRAFT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,  # entries of a residual read at a time
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    parts: tl.constexpr = CHUNK // BLOCK
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    request = tl.program_id(1)
    row = tl.arange(0, ROWS)
    layout = cu_ptr, index_ptr, draft_index_ptr, length_ptr, token_ptr
    state, target_row, draft_origin, num_drafted, token = request_layout(
        layout, request, vocab_size, row, MAX_DRAFT, HAS_LENGTH
    )
    temperature = tl.load(temperature_ptr + state)
    draft_temperature = tl.load(draft_temperature_ptr + state)
    # A greedy target does not read the proposals, nor does a coupled one.
    one_hot = ((draft_temperature <= 0) | (temperature <= 0)).to(tl.int32)
    if not HAS_DRAFT:
        one_hot = 1
    inv_temperature = inverse_temperature(temperature)
    inv_draft_temperature = inverse_temperature(draft_temperature)
    target_ptr += target_row * target_stride
    threshold_ptr += target_row
    draft_ptr += draft_origin * draft_stride_origin
    stats_ptr += request * (MAX_DRAFT + 1) * chunks
    mass_ptr += request * (MAX_DRAFT + 1) * chunks * parts
    seed = tl.load(seed_ptr + state)
    draw = tl.load(draw_ptr + state) + draw_offset
    draft_lse_ptr += draft_origin * draft_lse_stride_origin
    length, tau, undecided, log_a, u, target_lse, draft_lse = bound_acceptance(
        (stats_ptr, stats_stride, chunks),
        (target_ptr, target_stride, temperature, threshold_ptr),
        (draft_ptr, draft_stride_row, draft_temperature, draft_lse_ptr, draft_lse_stride_row),
        (token, num_drafted, one_hot),
        (seed, stream, draw),
        row,
        BLOCK_VERIFICATION,
        HAS_LSE,
        FILTERED,
        ROWS,
        CHUNKS,
    )
    num_undecided = tl.sum(undecided, axis=0)
    greedy = temperature <= 0
    if not DECIDE:
        # If nothing is undecided, tau is final: read its row now.
        undecided = tl.where((num_undecided == 0) & (row == tau), 1, undecided)
        # From 0, because with a dynamic first value Triton gives up on row64 loads. What LICM would
        # lift out of the loop is cheap, the registers that it takes are not.
        for ahead in tl.range(0, tl.where(greedy, 0, length + 1 - tau), disable_licm=True):
            r = tau + ahead
            if extract_lane(undecided, row, r) > 0:
                row64 = extract_lane(row.to(tl.int64), row, r)
                at = mass_ptr + (r * chunks + chunk) * parts
                target_row_ptr = target_ptr + row64 * target_stride
                threshold = float("-inf")
                if FILTERED:
                    threshold = tl.load(threshold_ptr + row64)
                if r < length:
                    residual = (
                        (target_row_ptr, inv_temperature, extract_lane(target_lse - log_a, row, r)),
                        (
                            draft_ptr + row64 * draft_stride_row,
                            inv_draft_temperature,
                            extract_lane(draft_lse, row, r),
                        ),
                        (threshold, extract_lane(token, row, r), one_hot),
                    )
                    store_residual_masses(
                        at, residual, chunk * CHUNK, vocab_size, CHUNK, STEP, BLOCK
                    )
                else:
                    entry = chunk * CHUNK + tl.arange(0, CHUNK)
                    x = load_kept(target_row_ptr, entry, vocab_size, inv_temperature, threshold)
                    maximum = tl.max(x, axis=0)
                    masses = block_masses(exp_shifted(x, maximum), CHUNK, BLOCK)
                    tl.store(stats_ptr + r * chunks + chunk, maximum)
                    tl.store(at + tl.arange(0, parts), masses)
    else:
        b = tl.arange(0, CHUNKS * parts)
        inside = b < chunks * parts
        undecided_mass = tl.load(
            mass_ptr + row[:, None] * chunks * parts + b[None, :],
            mask=(undecided > 0)[:, None] & inside[None, :],
            other=0.0,
        )
        s = tl.sum(undecided_mass, axis=1)
        h = s / (s + 1.0 - tl.where(undecided > 0, tl.exp(log_a), 0.0))
        accepted = tl.max(tl.where((undecided > 0) & (u < h.to(tl.float64)), row, -1), axis=0)
        # If every undecided prefix is rejected, the residual after tau has not been read yet.
        residual_unread = (num_undecided > 0) & (accepted < 0)
        tau = tl.maximum(tau, accepted)
        bonus = tau == length
        target_row_ptr = target_ptr + tau.to(tl.int64) * target_stride
        draft_row_ptr = draft_ptr + tau.to(tl.int64) * draft_stride_row
        threshold = float("-inf")
        if FILTERED:
            threshold = tl.load(threshold_ptr + tau, mask=num_drafted >= 0, other=float("-inf"))
        rejected = extract_lane(token, row, tau)
        residual = (
            (target_row_ptr, inv_temperature, extract_lane(target_lse - log_a, row, tau)),
            (draft_row_ptr, inv_draft_temperature, extract_lane(draft_lse, row, tau)),
            (threshold, rejected, one_hot),
        )
        earlier = chunks - 1
        if residual_unread:
            at = mass_ptr + (tau * chunks + chunk) * parts
            store_residual_masses(at, residual, chunk * CHUNK, vocab_size, CHUNK, STEP, BLOCK)
            # The last program of the request to arrive sees the masses of all.
            tl.debug_barrier()
            earlier = tl.atomic_add(arrived_ptr + request, 1, sem="acq_rel")
        if earlier == chunks - 1:
            next_token = tl.full((), -1, tl.int64)
            owner = tl.zeros((), tl.int32)
            next_lse = extract_lane(target_lse, row, tau)
            if greedy:
                c = tl.arange(0, CHUNKS)
                present = (c < chunks) & (num_drafted >= 0)
                slot = stats_ptr + tau * chunks + c
                maximum = tl.load(slot, mask=present, other=float("-inf"))
                index = tl.load(slot + stats_stride, mask=present, other=0.0)
                argmax = tl.max(argmax_of_chunks(maximum[None, :], index[None, :]), axis=0)
                next_token = tl.where(num_drafted >= 0, argmax, -1)
            elif num_drafted >= 0:
                mass = tl.load(mass_ptr + tau * chunks * parts + b, mask=inside, other=0.0)
                slot = stats_ptr + tau * chunks + b // parts
                maximum = tl.load(slot, mask=inside & bonus, other=float("-inf"))
                row_max = tl.max(maximum, axis=0)
                mass = tl.where(bonus, mass * exp_shifted(maximum, row_max), mass).to(tl.float64)
                total = tl.sum(mass, axis=0)
                if bonus:
                    next_lse = row_max + tl.log(total).to(tl.float32)
                goal = extract_lane(u, row, 0) * total
                if total > 0:
                    chosen, before = inverse_cdf_index(mass, b, goal)
                    owner = chosen // parts
                    if residual_unread | (owner == chunk):
                        entries = chosen * BLOCK + tl.arange(0, BLOCK)
                        if bonus:
                            x = load_kept(
                                target_row_ptr, entries, vocab_size, inv_temperature, threshold
                            )
                            weight = exp_shifted(x, row_max)
                        else:
                            weight = residual_weight(residual, entries, vocab_size)
                        index, _ = inverse_cdf_index(weight.to(tl.float64), entries, goal - before)
                        next_token = index.to(tl.int64)
                elif not bonus:
                    # No residual mass: p equals q, and the rejected token was drawn from q.
                    next_token = rejected
                elif tau == 0:
                    # The request's own row is invalid: vLLM's softmax of it is NaN everywhere and
                    # the argmax of NaN is token 0.
                    next_token = tl.zeros((), tl.int64)
            if residual_unread | (owner == chunk):
                out = tl.where(row < tau, token, tl.where(row == tau, next_token, -1))
                tl.store(out_ptr + request * (MAX_DRAFT + 1) + row, out, mask=row <= MAX_DRAFT)
                row_lse = tl.where(row < tau, target_lse, float("nan"))
                row_lse = tl.where(row == tau, next_lse, row_lse)
                lse_row_ptr = row_lse_ptr + request * (MAX_DRAFT + 1)
                tl.store(lse_row_ptr + row, row_lse, mask=row <= MAX_DRAFT)
                tl.store(count_ptr + request, tau)
                tl.store(count_ptr + count_stride + request, tau + (next_token >= 0).to(tl.int32))
