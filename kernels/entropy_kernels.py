"""Entropy-based stopping of drafts; cascade/entropy_stopping.py launches the kernels.

tools/reference/stopping.py is the rule. Rows are read once, chunk by chunk; what belongs to a
request is then decided by one program, which no other one of its launch reads from.
"""

import triton
import triton.language as tl

from vllm_hsd.kernels.blocks import load_scaled


@triton.jit(do_not_specialize=["stats_stride"])
def entropy_stats_kernel(
    stats_ptr,  # float32 [3, R, CHUNKS]: max(x); sums of e = exp(x - max) and of e * (x - max)
    stats_stride,  # R * CHUNKS
    logits_ptr,  # [R, V]
    logits_stride,
    chunks,
    vocab_size,
    CHUNK: tl.constexpr,
):
    slot = tl.program_id(0)
    row_ptr = logits_ptr + (slot // chunks).to(tl.int64) * logits_stride
    entry = (slot % chunks) * CHUNK + tl.arange(0, CHUNK)
    x = load_scaled(row_ptr, entry, vocab_size, 1.0)
    maximum = tl.max(x, axis=0)
    below = x - tl.where(maximum > float("-inf"), maximum, 0.0)
    weight = tl.exp(below)
    tl.store(stats_ptr + slot, maximum)
    tl.store(stats_ptr + slot + stats_stride, tl.sum(weight, axis=0))
    moment = tl.sum(tl.where(weight > 0, weight * below, 0.0), axis=0)
    tl.store(stats_ptr + slot + 2 * stats_stride, moment)


@triton.jit
def _entropy_of_chunks(maximum, total, moment):
    """Entropies in nats [rows] from chunks [rows, chunks] (absent ones: -inf, 0, 0).

    Not finite where a row holds a NaN or +inf, or only -inf.
    """
    row_max = tl.max(maximum, axis=1)
    below = maximum - tl.where(row_max > float("-inf"), row_max, 0.0)[:, None]
    weight = tl.exp(below)
    whole = tl.sum(total * weight, axis=1)
    moment = tl.where(total > 0, weight * (moment + below * total), 0.0)
    return tl.log(whole) - tl.sum(moment, axis=1) / whole


@triton.jit
def _observe_rejection(thresholds, slot, entropy_ptr, drafter_ptr, place):
    """Move the threshold of the level that drafted a rejected token."""
    total_ptr, count_ptr, slots = thresholds
    entropy = tl.load(entropy_ptr + place)
    # Unknown for tokens of levels that draft fixed lengths.
    if entropy == entropy:
        at = tl.load(drafter_ptr + place).to(tl.int64) * slots + slot
        tl.store(total_ptr + at, tl.load(total_ptr + at) + entropy.to(tl.float64))
        tl.store(count_ptr + at, tl.load(count_ptr + at) + 1)


@triton.jit(do_not_specialize=["stats_stride", "step"])
def stop_kernel(
    entropy_ptr,  # float32 [B, N] of the level's draft, NaN where it is not used
    drafter_ptr,  # int32 [B, N], the level that drafted each token
    below_entropy_ptr,  # float32 [B, BELOW], with VERIFIES or PASSES_ON
    below_drafter_ptr,  # int32 [B, BELOW]
    total_ptr,  # float64 [L, slots], entropies at rejected tokens
    count_ptr,  # int32 [L, slots], of such tokens
    slots,
    drafted_ptr,  # int32 [L, B]
    requested_ptr,  # int32 [L, B]
    level_stride,
    origin_ptr,  # int32 [B], with VERIFIES or PASSES_ON
    slot_ptr,  # int32 [B]
    accepted_ptr,  # int32 [B], with VERIFIES
    emitted_ptr,  # int32 [B], with VERIFIES
    stats_ptr,  # float32 [3, B * ROWS, CHUNKS], with MEASURED
    stats_stride,
    chunks,
    step,  # of a draft op
    VERIFIES: tl.constexpr,
    PASSES_ON: tl.constexpr,
    MEASURED: tl.constexpr,  # the level's drafts end by entropy
    LEVEL: tl.constexpr,
    FEEDER: tl.constexpr,  # the level whose draft is verified or passed on
    ADDS: tl.constexpr,  # False: the level draws no token of its own
    N: tl.constexpr,
    BELOW: tl.constexpr,
    ROWS: tl.constexpr,  # rows of logits for each request
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    own = LEVEL * level_stride + request
    thresholds = total_ptr, count_ptr, slots
    requested = tl.load(requested_ptr + own)
    number = tl.full((), 1 if ADDS else 0, tl.int32)
    if VERIFIES or PASSES_ON:
        origin = tl.load(origin_ptr + request)
    else:
        origin = tl.where(step < requested, step, -1)
    if origin >= 0:
        lane = tl.arange(0, LANES)
        if VERIFIES or PASSES_ON:
            below = tl.load(drafted_ptr + FEEDER * level_stride + request)
            below_place = request * BELOW
        if VERIFIES:
            accepted = tl.load(accepted_ptr + request)
            number = tl.load(emitted_ptr + request)
            if accepted < below:
                at = below_place + accepted
                _observe_rejection(thresholds, slot, below_entropy_ptr, below_drafter_ptr, at)
        if PASSES_ON:
            there = lane < below
            passed = tl.load(below_entropy_ptr + below_place + lane, mask=there)
            drafter = tl.load(below_drafter_ptr + below_place + lane, mask=there)
            tl.store(entropy_ptr + request * N + origin + lane, passed, mask=there)
            tl.store(drafter_ptr + request * N + origin + lane, drafter, mask=there)
            origin += below
        kept = lane < number
        entropy = tl.full([LANES], float("nan"), tl.float32)
        if MEASURED:
            c = tl.arange(0, CHUNKS)
            at = (request * ROWS + lane)[:, None] * chunks + c[None, :]
            inside = kept[:, None] & (c < chunks)[None, :]
            maximum = tl.load(stats_ptr + at, mask=inside, other=float("-inf"))
            total = tl.load(stats_ptr + at + stats_stride, mask=inside, other=0.0)
            moment = tl.load(stats_ptr + at + 2 * stats_stride, mask=inside, other=0.0)
            entropy = _entropy_of_chunks(maximum, total, moment)
            observed = tl.load(count_ptr + LEVEL * slots + slot)
            mean = tl.load(total_ptr + LEVEL * slots + slot) / tl.maximum(observed, 1)
            unsure = kept & (entropy.to(tl.float64) > mean) & (observed > 0)
            # The token that was drawn is kept, and is the last one of this draft.
            ends = tl.max(unsure.to(tl.int32), axis=0) > 0
            tl.store(requested_ptr + own, tl.where(ends, origin + number, requested))
        tl.store(entropy_ptr + request * N + origin + lane, entropy, mask=kept)
        tl.store(drafter_ptr + request * N + origin + lane, LEVEL, mask=kept)


@triton.jit
def observe_target_kernel(
    entropy_ptr,  # float32 [B, N] of the top level's draft
    drafter_ptr,  # int32 [B, N]
    total_ptr,  # float64 [L, slots]
    count_ptr,  # int32 [L, slots]
    slots,
    row_of_slot_ptr,  # int32 [slots], of the last proposal
    draft_length_ptr,  # int32 [B]
    index_ptr,  # int32 [num_reqs], slots of the batch
    num_sampled_ptr,  # int32 [num_reqs]
    num_rejected_ptr,  # int32 [num_reqs]
    N: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(index_ptr + request).to(tl.int64)
    row = tl.load(row_of_slot_ptr + slot).to(tl.int64)
    accepted = tl.load(num_sampled_ptr + request) - 1
    if (row >= 0) & (accepted >= 0):
        # The step has verified no more of the draft than it was fed.
        fed = accepted + tl.load(num_rejected_ptr + request)
        if accepted < tl.minimum(tl.load(draft_length_ptr + row), fed):
            thresholds = total_ptr, count_ptr, slots
            _observe_rejection(thresholds, slot, entropy_ptr, drafter_ptr, row * N + accepted)
