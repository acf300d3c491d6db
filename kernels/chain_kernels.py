"""The two kernels of chain verification; chain_verify.py launches them, README.md derives them."""

import triton
import triton.language as tl

from vllm_hsd.kernels.blocks import (
    block_masses,
    exp_below,
    greedy_token,
    inverse_temperature,
    lane,
    load_scaled,
    peak_and_index,
    peak_and_sum,
    pick,
)
from vllm_hsd.kernels.chain_rule import plan, request_layout, residual_weight
from vllm_hsd.kernels.rng import uniform


@triton.jit(do_not_specialize=["plane"])
def row_stats_kernel(
    stats_ptr,  # float32 [4, B, K + 1, CHUNKS]: peak, sum (T = 0: argmax) of target; of draft
    plane,  # B * (K + 1) * CHUNKS
    arrived_ptr,  # int32 [B]
    target_ptr,  # [sum(n_i + 1), V]
    target_stride,
    draft_ptr,  # [sum(n_i), V], or [max_num_reqs, K, V]
    draft_stride_origin,
    draft_stride_row,
    token_ptr,  # [sum(n_i)], or [sum(n_i + 1)]
    cu_ptr,  # [B + 1] draft tokens, or logits rows
    index_ptr,  # [B] -> max_num_reqs, with PADDED
    temperature_ptr,  # float32 [B], or [max_num_reqs]
    draft_temperature_ptr,  # like temperature
    vocab_size,
    MAX_DRAFT: tl.constexpr,
    ROWS: tl.constexpr,
    READ_DRAFT: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    request = tl.program_id(2)
    if (chunk == 0) & (row == 0):
        tl.store(arrived_ptr + request, 0)
    state, target_row, draft_origin, length, _ = request_layout(
        cu_ptr, index_ptr, token_ptr, request, vocab_size, tl.arange(0, ROWS), MAX_DRAFT, PADDED
    )
    temperature = tl.load(temperature_ptr + state)
    # Only a greedy request needs the row after its draft now: it may be the argmax to emit.
    if row < length + (temperature <= 0).to(tl.int32):
        entry = chunk * CHUNK + tl.arange(0, CHUNK)
        slot = stats_ptr + (request * (MAX_DRAFT + 1) + row) * tl.num_programs(0) + chunk
        x = load_scaled(
            target_ptr + (target_row + row) * target_stride,
            entry,
            vocab_size,
            inverse_temperature(temperature),
        )
        if temperature > 0:
            peak, second = peak_and_sum(x)
        else:
            peak, second = peak_and_index(x, entry)
        tl.store(slot, peak)
        tl.store(slot + plane, second)
        if READ_DRAFT:
            draft_temperature = tl.load(draft_temperature_ptr + state)
            if (temperature > 0) & (draft_temperature > 0):
                x = load_scaled(
                    draft_ptr + draft_origin * draft_stride_origin + row * draft_stride_row,
                    entry,
                    vocab_size,
                    1.0 / draft_temperature,
                )
                peak, second = peak_and_sum(x)
                tl.store(slot + 2 * plane, peak)
                tl.store(slot + 3 * plane, second)


@triton.jit(do_not_specialize=["plane", "accept_stream", "final_stream", "num_requests"])
def settle_kernel(
    out_ptr,  # int64 [B, K + 1], -1 after the emitted tokens (launch 3)
    count_ptr,  # int32 [2, B]: accepted; emitted (launch 3)
    mass_ptr,  # float32 [B, K + 1, CHUNKS, CHUNK / BLOCK], of residuals; of p after a whole draft
    stats_ptr,  # float32 [4, B, K + 1, CHUNKS], see row_stats_kernel
    plane,  # B * (K + 1) * CHUNKS
    arrived_ptr,  # int32 [B]
    target_ptr,  # [sum(n_i + 1), V]
    target_stride,
    draft_ptr,  # [sum(n_i), V], or [max_num_reqs, K, V]
    draft_stride_origin,
    draft_stride_row,
    draft_lse_ptr,  # float32 [sum(n_i)], or [max_num_reqs, K]
    draft_lse_stride_origin,
    draft_lse_stride_row,
    token_ptr,  # [sum(n_i)], or [sum(n_i + 1)]
    cu_ptr,  # [B + 1] draft tokens, or logits rows
    index_ptr,  # [B] -> max_num_reqs, with PADDED
    temperature_ptr,  # float32 [B], or [max_num_reqs]
    draft_temperature_ptr,  # like temperature
    seed_ptr,  # int64, like temperature
    draw_ptr,  # int64, like temperature
    accept_stream,
    final_stream,
    vocab_size,
    num_requests,
    DECIDE: tl.constexpr,  # False: launch 2, residual masses; True: launch 3
    HIERARCHICAL: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PADDED: tl.constexpr,
    MAX_DRAFT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    parts: tl.constexpr = CHUNK // BLOCK
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    request = tl.program_id(1)
    row = tl.arange(0, ROWS)
    part = chunk * parts + tl.arange(0, parts)
    state, target_row, draft_origin, drawn, token = request_layout(
        cu_ptr, index_ptr, token_ptr, request, vocab_size, row, MAX_DRAFT, PADDED
    )
    temperature = tl.load(temperature_ptr + state)
    draft_temperature = tl.load(draft_temperature_ptr + state)
    # To a greedy target the proposal row makes no difference.
    one_hot = ((draft_temperature <= 0) | (temperature <= 0)).to(tl.int32)
    if not HAS_DRAFT:
        one_hot = 1
    inv_temperature = inverse_temperature(temperature)
    inv_draft_temperature = inverse_temperature(draft_temperature)
    target_ptr += target_row * target_stride
    draft_ptr += draft_origin * draft_stride_origin
    stats_ptr += request * (MAX_DRAFT + 1) * chunks
    mass_ptr += request * (MAX_DRAFT + 1) * chunks * parts
    seed = tl.load(seed_ptr + state)
    draw = tl.load(draw_ptr + state)
    length, tau, open_, log_a, coin, target_lse, draft_lse = plan(
        stats_ptr,
        plane,
        target_ptr,
        target_stride,
        draft_ptr,
        draft_stride_row,
        draft_lse_ptr + draft_origin * draft_lse_stride_origin,
        draft_lse_stride_row,
        token,
        drawn,
        seed,
        draw,
        accept_stream,
        temperature,
        draft_temperature,
        one_hot,
        chunks,
        row,
        HIERARCHICAL,
        HAS_LSE,
        ROWS,
        CHUNKS,
    )
    entry = chunk * CHUNK + tl.arange(0, CHUNK)
    num_open = tl.sum(open_, axis=0)
    greedy = temperature <= 0
    if not DECIDE:
        # Where nothing is open the certain success is the answer: read its row now.
        open_ = tl.where((num_open == 0) & (row == tau), 1, open_)
        # From 0, because a first value that is not constant makes Triton give up on wide loads; and
        # what LICM would lift out of the loop is cheap, the registers that it takes are not.
        for ahead in tl.range(0, tl.where(greedy, 0, length + 1 - tau), disable_licm=True):
            r = tau + ahead
            if lane(open_, row, r) > 0:
                wide = lane(row.to(tl.int64), row, r)
                target_row_ptr = target_ptr + wide * target_stride
                if r < length:
                    weight = residual_weight(
                        target_row_ptr,
                        draft_ptr + wide * draft_stride_row,
                        entry,
                        vocab_size,
                        inv_temperature,
                        inv_draft_temperature,
                        lane(target_lse - log_a, row, r),
                        lane(draft_lse, row, r),
                        lane(token, row, r),
                        one_hot,
                    )
                else:
                    x = load_scaled(target_row_ptr, entry, vocab_size, inv_temperature)
                    peak = tl.max(x, axis=0)
                    weight = exp_below(x, peak)
                    tl.store(stats_ptr + r * chunks + chunk, peak)
                masses = block_masses(weight, CHUNK, BLOCK)
                tl.store(mass_ptr + r * chunks * parts + part, masses)
    else:
        b = tl.arange(0, CHUNKS * parts)
        inside = b < chunks * parts
        open_mass = tl.load(
            mass_ptr + row[:, None] * chunks * parts + b[None, :],
            mask=(open_ > 0)[:, None] & inside[None, :],
            other=0.0,
        )
        s = tl.sum(open_mass, axis=1)
        h = s / (s + 1.0 - tl.where(open_ > 0, tl.exp(log_a), 0.0))
        won = tl.max(tl.where((open_ > 0) & (coin < h.to(tl.float64)), row, -1), axis=0)
        # If every open position failed, the residual of the certain one has not been read yet.
        late = (num_open > 0) & (won < 0)
        tau = tl.maximum(tau, won)
        bonus = tau == length
        target_row_ptr = target_ptr + tau.to(tl.int64) * target_stride
        draft_row_ptr = draft_ptr + tau.to(tl.int64) * draft_stride_row
        target_shift = lane(target_lse - log_a, row, tau)
        q_shift = lane(draft_lse, row, tau)
        rejected = lane(token, row, tau)
        earlier = chunks - 1
        if late:
            weight = residual_weight(
                target_row_ptr,
                draft_row_ptr,
                entry,
                vocab_size,
                inv_temperature,
                inv_draft_temperature,
                target_shift,
                q_shift,
                rejected,
                one_hot,
            )
            masses = block_masses(weight, CHUNK, BLOCK)
            tl.store(mass_ptr + tau * chunks * parts + part, masses)
            # The last program of the request to arrive sees the masses of all.
            tl.debug_barrier()
            earlier = tl.atomic_add(arrived_ptr + request, 1, sem="acq_rel")
        if earlier == chunks - 1:
            final = tl.full((), -1, tl.int64)
            owner = tl.zeros((), tl.int32)
            if greedy:
                c = tl.arange(0, CHUNKS)
                present = (c < chunks) & (drawn >= 0)
                slot = stats_ptr + tau * chunks + c
                peak = tl.load(slot, mask=present, other=float("-inf"))
                final = greedy_token(peak, tl.load(slot + plane, mask=present, other=0.0))
            elif drawn >= 0:
                mass = tl.load(mass_ptr + tau * chunks * parts + b, mask=inside, other=0.0)
                slot = stats_ptr + tau * chunks + b // parts
                peak = tl.load(slot, mask=inside & bonus, other=float("-inf"))
                top = tl.max(peak, axis=0)
                mass = tl.where(bonus, mass * exp_below(peak, top), mass).to(tl.float64)
                total = tl.sum(mass, axis=0)
                goal = uniform(seed, final_stream, draw) * total
                if total > 0:
                    chosen, before = pick(mass, b, goal)
                    owner = chosen // parts
                    if late | (owner == chunk):
                        entries = chosen * BLOCK + tl.arange(0, BLOCK)
                        if bonus:
                            x = load_scaled(target_row_ptr, entries, vocab_size, inv_temperature)
                            weight = exp_below(x, top)
                        else:
                            weight = residual_weight(
                                target_row_ptr,
                                draft_row_ptr,
                                entries,
                                vocab_size,
                                inv_temperature,
                                inv_draft_temperature,
                                target_shift,
                                q_shift,
                                rejected,
                                one_hot,
                            )
                        index, _ = pick(weight.to(tl.float64), entries, goal - before)
                        final = index.to(tl.int64)
                elif not bonus:
                    # No residual mass: p is q, and the rejected token was drawn from q.
                    final = rejected
            if late | (owner == chunk):
                out = tl.where(row < tau, token, tl.where(row == tau, final, -1))
                tl.store(out_ptr + request * (MAX_DRAFT + 1) + row, out, mask=row <= MAX_DRAFT)
                tl.store(count_ptr + request, tau)
                tl.store(count_ptr + num_requests + request, tau + (final >= 0).to(tl.int32))
