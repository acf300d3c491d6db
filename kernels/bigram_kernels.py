"""Rows of a bigram model as logits; cascade/bigram_rows.py launches the kernel.

`PairCounts.distribution` in cascade/bigram.py is its rule in plain numpy.
"""

import triton
import triton.language as tl


@triton.jit
def _first_not_below(values_ptr, low, high, wanted):
    """The first place, low to high - 1, of ascending numbers that is not below the wanted one."""
    while low < high:
        middle = (low + high) // 2
        below = tl.load(values_ptr + middle) < wanted
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def bigram_rows_kernel(
    row_ptr,  # [R, V], logarithms of the probabilities
    starts_ptr,  # int32 [V + 1], first pair of each token, and the end
    following_ptr,  # int32 [P], the second token of each pair
    count_ptr,  # int32 [P], how often it was seen
    seen_ptr,  # int32 [V], tokens seen after each token
    single_ptr,  # float32 [V], logarithms
    window_ptr,  # int32 [B, capacity]
    window_stride,
    end_ptr,  # int32 [B]
    start_ptr,  # int32 [B], of the draft from below, with VERIFIES
    slot_ptr,  # int32 [B]
    vocab_size,
    VERIFIES: tl.constexpr,
    ROWS: tl.constexpr,  # for each request
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,  # pairs that are read at once
):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * CHUNK
    request = row // ROWS
    end = tl.load(end_ptr + request)
    if VERIFIES:
        # Nothing is kept of rows past a draft.
        end = tl.minimum(tl.load(start_ptr + request) + (row % ROWS).to(tl.int32), end)
    window_ptr += request * window_stride
    # Padding has no tokens.
    token = tl.load(window_ptr + end - 1, mask=tl.load(slot_ptr + request) >= 0, other=0)
    # A lookup may have drafted a placeholder that the vocabulary has not: nothing is kept after it.
    token = tl.where(token < vocab_size, token, 0)
    pair = tl.load(starts_ptr + token)
    stop = tl.load(starts_ptr + token + 1)
    distinct = (stop - pair).to(tl.float32)
    # After a token without a pair: single tokens.
    weight = tl.where(stop > pair, distinct, 1.0)
    total = tl.load(seen_ptr + token).to(tl.float32) + weight
    entry = begin + tl.arange(0, CHUNK)
    inside = entry < vocab_size
    single = tl.load(single_ptr + entry, mask=inside, other=0.0)
    row_ptr += row * vocab_size
    tl.store(row_ptr + entry, single + tl.log(weight / total), mask=inside)
    # What is stored of pairs comes after it.
    tl.debug_barrier()
    pair = _first_not_below(following_ptr, pair, stop, begin)
    stop = _first_not_below(following_ptr, pair, stop, begin + CHUNK)
    while pair < stop:
        lane = pair + tl.arange(0, LANES)
        here = lane < stop
        after = tl.load(following_ptr + lane, mask=here, other=0)
        count = tl.load(count_ptr + lane, mask=here, other=0).to(tl.float32)
        count += weight * tl.exp(tl.load(single_ptr + after, mask=here, other=0.0))
        tl.store(row_ptr + after, tl.log(count / total), mask=here)
        pair += LANES
