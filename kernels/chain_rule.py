"""The acceptance rule of a chain inside kernels, and the layout of a request.

Used by chain_kernels.py; README.md in this directory has the derivation.
"""

import triton
import triton.language as tl

from vllm_hsd.kernels.blocks import (
    argmax_of_chunks,
    block_masses,
    inverse_temperature,
    is_finite,
    load_scaled,
    logsumexp_of_chunks,
)
from vllm_hsd.kernels.rng import uniform

# Replaces log(0) where sums must not meet -inf - -inf.
_LOG_ZERO = tl.constexpr(-1.0e30)


@triton.jit
def request_layout(
    layout,
    request,
    vocab_size,
    row,
    MAX_DRAFT: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
):
    """Position of a request's rows and tokens, and its draft up to the first empty slot.

    Returns (state index, first target row, entry of the draft, draft length, tokens [ROWS]); the
    length is -1 where a request has no logits row at all. `layout` are the pointers cu, index,
    draft index, length and token of the kernels.
    """
    cu_ptr, index_ptr, draft_index_ptr, length_ptr, token_ptr = layout
    begin = tl.load(cu_ptr + request).to(tl.int64)
    count = tl.load(cu_ptr + request + 1).to(tl.int64) - begin
    state = tl.load(index_ptr + request).to(tl.int64)
    draft_index = tl.load(draft_index_ptr + request).to(tl.int64)
    # Without rows of its own, index 0 is only pointed at.
    draft_origin = tl.maximum(draft_index, 0)
    slots = count - 1
    if HAS_LENGTH:
        slots = tl.minimum(slots, tl.maximum(tl.load(length_ptr + draft_origin), 0).to(tl.int64))
    slots = tl.where((count > 0) & (draft_index < 0), 0, slots)
    slots = tl.minimum(slots, MAX_DRAFT).to(tl.int32)
    # A token is stored at the row that it was the input of.
    token = tl.load(token_ptr + begin + 1 + row, mask=row < slots, other=-1).to(tl.int64)
    valid = (token >= 0) & (token < vocab_size)
    # There are more lanes than slots, so some lane is always empty.
    length = tl.min(tl.where(valid, 2147483647, row), axis=0)
    length = tl.where(slots < 0, -1, length)
    return state, begin, draft_origin, length, token


@triton.jit
def _compose_capped(sum1, cap1, sum2, cap2):
    """Compose the maps log a -> min(cap, log a + sum): first map 1, then map 2."""
    return sum1 + sum2, tl.minimum(cap2, cap1 + sum2)


@triton.jit
def bound_acceptance(
    stats,
    target,
    draft,
    drafted,
    key,
    row,
    BLOCK_VERIFICATION: tl.constexpr,
    HAS_LSE: tl.constexpr,
    FILTERED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """What the logsumexps alone decide about a request; pointers are at its first row.

    Lane r is the prefix of r tokens and the rows after it. `stats`: pointer, stride, chunks;
    `target`: pointer, stride, T, thresholds; `draft`: pointer, stride, T, logsumexps, their stride;
    `drafted`: tokens [ROWS], how many, whether they are point masses; `key`: (seed, stream, draw)
    of the first uniform.

    Returns (valid length, longest prefix that is certainly accepted, int32 [ROWS] 1 where a
    longer prefix may still be accepted, log prefix acceptance probability [ROWS], uniforms
    [ROWS], logsumexps of target [ROWS] and proposals [ROWS]).
    """
    stats_ptr, stats_stride, chunks = stats
    target_ptr, target_stride, temperature, threshold_ptr = target
    draft_ptr, draft_stride_row, draft_temperature, draft_lse_ptr, draft_lse_stride_row = draft
    token, length, one_hot = drafted
    seed, stream, draw = key
    c = tl.arange(0, CHUNKS)
    inside = (row < length)[:, None] & (c < chunks)[None, :]
    slot = stats_ptr + row[:, None] * chunks + c[None, :]
    maximum = tl.load(slot, mask=inside, other=float("-inf"))
    second = tl.load(slot + stats_stride, mask=inside, other=0.0)
    in_draft = row < length
    if temperature > 0:
        target_lse = logsumexp_of_chunks(maximum, second)
        # 64-bit offsets: a row number times the vocabulary exceeds 2**31.
        logit_ptr = target_ptr + row.to(tl.int64) * target_stride + token
        logit = tl.load(logit_ptr, mask=in_draft, other=0.0).to(tl.float32)
        scaled = logit * inverse_temperature(temperature)
        if FILTERED:
            threshold = tl.load(threshold_ptr + row, mask=in_draft, other=float("-inf"))
            scaled = tl.where(scaled < threshold, float("-inf"), scaled)
        log_p = scaled - target_lse
        valid = is_finite(target_lse)
    else:
        log_p = tl.where(argmax_of_chunks(maximum, second) == token, 0.0, float("-inf"))
        # Every row has an argmax, and greedy decoding takes it whatever it is.
        valid = row >= 0
        target_lse = tl.zeros_like(log_p)
    draft_lse = tl.zeros_like(target_lse)
    log_q = tl.zeros_like(target_lse)
    if one_hot == 0:
        if HAS_LSE:
            lse_ptr = draft_lse_ptr + row.to(tl.int64) * draft_lse_stride_row
            draft_lse = tl.load(lse_ptr, mask=in_draft, other=0.0)
        else:
            draft_lse = logsumexp_of_chunks(
                tl.load(slot + 2 * stats_stride, mask=inside, other=float("-inf")),
                tl.load(slot + 3 * stats_stride, mask=inside, other=0.0),
            )
        logit_ptr = draft_ptr + row.to(tl.int64) * draft_stride_row + token
        logit = tl.load(logit_ptr, mask=in_draft, other=0.0).to(tl.float32)
        log_q = logit * inverse_temperature(draft_temperature) - draft_lse
        valid = valid & is_finite(draft_lse)
    length = tl.minimum(length, tl.min(tl.where(valid, 2147483647, row), axis=0))

    in_draft = row < length
    possible = in_draft & (log_p > float("-inf")) & (log_q > float("-inf"))
    log_ratio = tl.where(possible, log_p - log_q, _LOG_ZERO)
    log_accept = tl.minimum(log_ratio, 0.0)
    if BLOCK_VERIFICATION:
        _, log_accept = tl.associative_scan((log_ratio, log_accept), 0, _compose_capped)
    # Row r yields the probability of prefix r + 1: move up one lane, 1 for the empty prefix.
    earlier = row[None, :] == row[:, None] - 1
    log_a = tl.sum(tl.where(earlier, log_accept[None, :], 0.0), axis=1)
    u = uniform(seed, stream, draw + row)
    a = tl.exp(log_a)
    if BLOCK_VERIFICATION:
        # Bounds on the residual mass from the next draft token alone (see README).
        p = tl.where(in_draft, tl.exp(log_p), 0.0)
        q = tl.where(in_draft, tl.exp(log_q), 0.0)
        low = tl.maximum(a * p - q, 0.0) + tl.maximum(a * (1.0 - p) - (1.0 - q), 0.0)
        high = a - tl.minimum(a * p, q)
        low = tl.where(a < 1.0, low / (low + 1.0 - a), 1.0)
        high = tl.where(a < 1.0, high / (high + 1.0 - a), 1.0)
        success = (row <= length) & (u < tl.where(row == length, a, low).to(tl.float64))
        certain = tl.max(tl.where(success | (row == 0), row, 0), axis=0)
        undecided = (row > certain) & (row < length) & (u < high.to(tl.float64))
    else:
        failure = (row > 0) & (u >= a.to(tl.float64))
        certain = tl.minimum(tl.min(tl.where(failure, row, ROWS), axis=0) - 1, length)
        certain = tl.maximum(certain, 0)
        undecided = row < 0
        log_a = tl.zeros_like(log_a)
    return length, certain, undecided.to(tl.int32), log_a, u, target_lse, draft_lse


@triton.jit
def residual_weight(residual, entry, vocab_size):
    """max(a * p - q, 0) of one block.

    `residual`: (target row, 1 / T, logsumexp - log a), (proposal row, 1 / T, logsumexp), (threshold
    of the target's row, drafted token, whether the proposal is a point mass there).
    """
    target, draft, proposed = residual
    target_row_ptr, inv_temperature, target_shift = target
    draft_row_ptr, inv_draft_temperature, draft_lse = draft
    threshold, token, one_hot = proposed
    x = load_scaled(target_row_ptr, entry, vocab_size, inv_temperature)
    # With -inf in place of the filtered logits, as in load_kept, registers spill.
    weight = tl.where(x < threshold, 0.0, tl.exp(x - target_shift))
    if one_hot:
        weight = tl.where(entry == token, 0.0, weight)
    else:
        x = load_scaled(draft_row_ptr, entry, vocab_size, inv_draft_temperature)
        weight = tl.maximum(weight - tl.exp(x - draft_lse), 0.0)
    return weight


@triton.jit
def store_residual_masses(
    mass_ptr,
    residual,
    first,
    vocab_size,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Masses of the blocks of one chunk of a residual, float32 [CHUNK / BLOCK] at mass_ptr.

    `first` is the chunk's first entry; STEP entries are read at a time.
    """
    for offset in tl.range(0, CHUNK, STEP):
        entry = first + offset + tl.arange(0, STEP)
        weight = residual_weight(residual, entry, vocab_size)
        part = offset // BLOCK + tl.arange(0, STEP // BLOCK)
        tl.store(mass_ptr + part, block_masses(weight, STEP, BLOCK))
