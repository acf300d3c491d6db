"""Rows of an n-gram language model as logits; runner_v2/ngram_rows.py launches the kernels.

core/ngram_model.py is their rule in plain numpy. What follows a context in the store lies in one
interval of the order of its texts, and in it every distinct token is one run (core/text_order.py).
"""

import triton
import triton.language as tl

from vllm_hsd.kernels.suffix_kernels import _bound, _token_at, matched_tokens


@triton.jit
def _first_not_below(values_ptr, low, high, wanted, WAYS: tl.constexpr):
    """First place of ascending numbers that is not below the wanted one."""
    way = tl.arange(0, WAYS)
    while low < high:
        size = high - low
        index = low + size * (way + 1) // (WAYS + 1)
        below = tl.sum((tl.load(values_ptr + index) < wanted).to(tl.int32), axis=0)
        high = tl.where(below < WAYS, low + size * (below + 1) // (WAYS + 1), high)
        low = tl.where(below > 0, low + size * below // (WAYS + 1) + 1, low)
    return low


@triton.jit
def _follower(tokens_ptr, order_ptr, starts_ptr, run, k, mask):
    """The last token of runs of k + 1 tokens; END_OF_TEXT is -1."""
    first = tl.load(starts_ptr + run, mask=mask, other=0)
    return tl.load(tokens_ptr + tl.load(order_ptr + first, mask=mask, other=0) + k, mask=mask)


@triton.jit
def _first_with(tokens_ptr, order_ptr, starts_ptr, k, low, high, wanted):
    """First of the runs low to high - 1 whose last token is not before the wanted one, [N] each."""
    while tl.max(high - low, axis=0) > 0:
        middle = (low + high) // 2
        going = low < high
        found = _follower(tokens_ptr, order_ptr, starts_ptr, middle, k, going)
        before = going & (found < wanted)
        high = tl.where(going & (before == 0), middle, high)
        low = tl.where(before, middle + 1, low)
    return low


@triton.jit
def _own_occurrences(
    token_ptr,
    match_ptr,
    window_ptr,
    text_ptr,
    base,
    length,
    ORDER: tl.constexpr,
    OCCURRENCES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write what followed the last token before, latest first, and how many tokens agree there.

    Returns how many such places there are, OCCURRENCES at most.
    """
    count = tl.zeros((), tl.int32)
    chunk = ((length - 2) // CHUNK).to(tl.int32)
    while (chunk >= 0) & (count < OCCURRENCES):
        at = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        matched = matched_tokens(
            window_ptr, text_ptr, base, length, at, at < length - 1, ORDER, CHUNK
        )
        here = (matched > 0).to(tl.int32)
        number = tl.sum(here, axis=0)
        rank = count + number - tl.cumsum(here, axis=0)
        kept = (here > 0) & (rank < OCCURRENCES)
        next_token = _token_at(window_ptr, text_ptr, base, at + 1, kept)
        tl.store(token_ptr + rank, next_token, mask=kept)
        tl.store(match_ptr + rank, matched, mask=kept)
        count += number
        chunk -= 1
    return tl.minimum(count, OCCURRENCES)


@triton.jit
def ngram_contexts_kernel(
    rest_ptr,  # float32 [R], share of the single tokens
    share_ptr,  # float32 [R, ORDER], of a token once seen after the last 1, 2, ... tokens
    run_ptr,  # int32 [R, ORDER, 2], first run of tokens seen there in the store, and the end
    token_ptr,  # int32 [R, OCCURRENCES], different tokens seen in the request's own text, or -1
    weight_ptr,  # float32 [R, OCCURRENCES], their shares of all contexts
    match_ptr,  # int32 [R, OCCURRENCES]
    tokens_ptr,  # int32 [total], texts of the store
    order_ptr,  # int32 [size]
    starts_ptr,  # int32, runs of 2, 3, ... tokens, see ngram_rows.Runs
    offset_ptr,  # int32 [ORDER + 1], where these begin
    window_ptr,  # int32 [B, capacity]
    window_stride,
    base_ptr,  # int64 [B]
    end_ptr,  # int32 [B]
    start_ptr,  # int32 [B], of the draft from below, with VERIFIES
    slot_ptr,  # int32 [B]
    text_ptr,  # int32 [max_num_reqs, max_model_len]
    text_stride,
    total,
    size,
    own_weight_ptr,  # float64 [1], of an occurrence in the own text
    VERIFIES: tl.constexpr,
    ROWS: tl.constexpr,  # for each request
    ORDER: tl.constexpr,
    DEPTH: tl.constexpr,  # lanes of a context
    OCCURRENCES: tl.constexpr,
    VOTERS: tl.constexpr,
    WAYS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    request = row // ROWS
    slot = tl.load(slot_ptr + request).to(tl.int64)
    lane = tl.arange(0, OCCURRENCES)
    order = tl.arange(0, DEPTH)
    token_ptr += row.to(tl.int64) * OCCURRENCES
    weight_ptr += row.to(tl.int64) * OCCURRENCES
    match_ptr += row.to(tl.int64) * OCCURRENCES
    number = tl.zeros([DEPTH], tl.float64)
    distinct = tl.zeros([DEPTH], tl.float64)
    token = tl.full([OCCURRENCES], -1, tl.int32)
    matched = tl.zeros([OCCURRENCES], tl.int32)
    earlier = tl.zeros([OCCURRENCES], tl.int32)
    count = tl.zeros((), tl.int32)
    own = tl.load(own_weight_ptr)
    for k in tl.static_range(ORDER):
        tl.store(run_ptr + (row * ORDER + k) * 2, 0)
        tl.store(run_ptr + (row * ORDER + k) * 2 + 1, 0)
    if slot >= 0:
        end = tl.load(end_ptr + request)
        if VERIFIES:
            # Nothing is kept of rows past a draft.
            end = tl.minimum(tl.load(start_ptr + request) + row % ROWS, end)
        base = tl.load(base_ptr + request)
        length = base + end
        window_ptr += request.to(tl.int64) * window_stride
        text_ptr += slot * text_stride
        count = _own_occurrences(
            token_ptr, match_ptr, window_ptr, text_ptr, base, length, ORDER, OCCURRENCES, CHUNK
        )
        # All have written the places.
        tl.debug_barrier()
        token = tl.load(token_ptr + lane, mask=lane < count, other=-1)
        matched = tl.load(match_ptr + lane, mask=lane < count, other=0)
        # The longest context after which a token was seen at a place before in this list.
        first = tl.zeros((), tl.int32)
        while first < count:
            voter = first + tl.arange(0, VOTERS)
            other = tl.load(token_ptr + voter, mask=voter < count, other=-2)
            theirs = tl.load(match_ptr + voter, mask=voter < count, other=0)
            same = (token[:, None] == other[None, :]) & (voter[None, :] < lane[:, None])
            earlier = tl.maximum(earlier, tl.max(tl.where(same, theirs[None, :], 0), axis=1))
            first += VOTERS
        seen = length > 0
        for k in tl.static_range(1, ORDER + 1):
            low = tl.zeros((), tl.int32)
            high = low
            seen = seen & (length >= k)
            if seen:
                at = length - k + order
                context = _token_at(window_ptr, text_ptr, base, at, order < k)
                everything = low + size
                low = _bound(
                    tokens_ptr, order_ptr, low, everything, context, k, total, False, WAYS, DEPTH
                )
                high = _bound(
                    tokens_ptr, order_ptr, low, everything, context, k, total, True, WAYS, DEPTH
                )
            seen = low < high
            runs_ptr = starts_ptr + tl.load(offset_ptr + k - 1)
            runs = tl.load(offset_ptr + k) - tl.load(offset_ptr + k - 1) - 1
            begin = tl.zeros((), tl.int32)
            stop = begin
            if seen:
                begin = _first_not_below(runs_ptr, begin, runs, low, WAYS)
                stop = _first_not_below(runs_ptr, begin, runs, high, WAYS)
                # Nothing follows where a text ends, which is before all tokens.
                ends = _follower(tokens_ptr, order_ptr, runs_ptr, begin, k, True) < 0
                begin = tl.where(ends, begin + 1, begin)
                low = tl.load(runs_ptr + begin)
            tl.store(run_ptr + (row * ORDER + k - 1) * 2, begin)
            tl.store(run_ptr + (row * ORDER + k - 1) * 2 + 1, stop)
            new = (matched >= k) & (earlier < k)
            a = tl.where(new, begin, stop) + tl.zeros([OCCURRENCES], tl.int32)
            b = stop + tl.zeros([OCCURRENCES], tl.int32)
            a = _first_with(tokens_ptr, order_ptr, runs_ptr, k, a, b, token)
            there = new & (a < stop)
            there = there & (_follower(tokens_ptr, order_ptr, runs_ptr, a, k, there) == token)
            different = stop - begin + tl.sum((new & (there == 0)).to(tl.int32), axis=0)
            in_own = tl.sum((matched >= k).to(tl.int32), axis=0)
            whole = tl.where(begin < stop, high - low, 0) + own * in_own
            distinct = tl.where(order == k - 1, different.to(tl.float64), distinct)
            number = tl.where(order == k - 1, whole, number)
    rest = tl.full((), 1.0, tl.float64)
    weight = tl.zeros([OCCURRENCES], tl.float64)
    for i in tl.static_range(ORDER):
        here = order == ORDER - 1 - i
        whole = tl.sum(tl.where(here, number, 0.0), axis=0)
        different = tl.sum(tl.where(here, distinct, 0.0), axis=0)
        share = tl.where(whole > 0, rest / tl.where(whole > 0, whole + different, 1.0), 0.0)
        rest = tl.where(whole > 0, share * different, rest)
        weight += tl.where(matched >= ORDER - i, own * share, 0.0)
        tl.store(share_ptr + row * ORDER + ORDER - 1 - i, share.to(tl.float32))
    tl.store(rest_ptr + row, rest.to(tl.float32))
    tl.store(weight_ptr + lane, weight.to(tl.float32))
    tl.debug_barrier()
    summed = tl.zeros([OCCURRENCES], tl.float32)
    first = tl.zeros((), tl.int32)
    while first < count:
        voter = first + tl.arange(0, VOTERS)
        other = tl.load(token_ptr + voter, mask=voter < count, other=-2)
        theirs = tl.load(weight_ptr + voter, mask=voter < count, other=0.0)
        same = token[:, None] == other[None, :]
        summed += tl.sum(tl.where(same, theirs[None, :], 0.0), axis=1)
        first += VOTERS
    # All have read them.
    tl.debug_barrier()
    tl.store(weight_ptr + lane, summed)
    # Each token once, for the first of its places.
    tl.store(token_ptr + lane, tl.where(earlier == 0, token, -1))


@triton.jit
def ngram_rows_kernel(
    row_ptr,  # float32 [R, V], logarithms of the probabilities
    rest_ptr,  # float32 [R]
    share_ptr,  # float32 [R, ORDER]
    run_ptr,  # int32 [R, ORDER, 2]
    token_ptr,  # int32 [R, OCCURRENCES]
    weight_ptr,  # float32 [R, OCCURRENCES]
    single_ptr,  # float32 [V]
    tokens_ptr,  # int32 [total]
    order_ptr,  # int32 [size]
    starts_ptr,  # int32
    offset_ptr,  # int32 [ORDER + 1]
    vocab_size,
    ORDER: tl.constexpr,
    OCCURRENCES: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * CHUNK
    last = tl.minimum(first + CHUNK, vocab_size)
    row_ptr += row * vocab_size
    entry = first + tl.arange(0, CHUNK)
    inside = entry < vocab_size
    base = tl.load(rest_ptr + row) * tl.load(single_ptr + entry, mask=inside, other=0.0)
    tl.store(row_ptr + entry, base, mask=inside)
    lane = tl.arange(0, LANES)
    for k in tl.static_range(1, ORDER + 1):
        begin = tl.load(run_ptr + (row * ORDER + k - 1) * 2)
        stop = tl.load(run_ptr + (row * ORDER + k - 1) * 2 + 1)
        if begin < stop:
            share = tl.load(share_ptr + row * ORDER + k - 1)
            runs_ptr = starts_ptr + tl.load(offset_ptr + k - 1)
            # The runs of this chunk; those of all chunks are in the order of their tokens.
            edge = tl.where(lane == 0, first, last)
            a = begin + tl.zeros([LANES], tl.int32)
            b = stop + tl.zeros([LANES], tl.int32)
            a = _first_with(tokens_ptr, order_ptr, runs_ptr, k, a, b, edge)
            begin = tl.sum(tl.where(lane == 0, a, 0), axis=0)
            stop = tl.max(a, axis=0)
            # All have stored what is read here.
            tl.debug_barrier()
            while begin < stop:
                run = begin + lane
                here = run < stop
                token = _follower(tokens_ptr, order_ptr, runs_ptr, run, k, here)
                times = tl.load(runs_ptr + run + 1, mask=here, other=0)
                times -= tl.load(runs_ptr + run, mask=here, other=0)
                before = tl.load(row_ptr + token, mask=here, other=0.0)
                tl.store(row_ptr + token, before + share * times.to(tl.float32), mask=here)
                begin += LANES
    own = row * OCCURRENCES + tl.arange(0, OCCURRENCES)
    token = tl.load(token_ptr + own)
    here = (token >= first) & (token < last)
    tl.debug_barrier()
    before = tl.load(row_ptr + token, mask=here, other=0.0)
    tl.store(row_ptr + token, before + tl.load(weight_ptr + own), mask=here)
    tl.debug_barrier()
    probability = tl.load(row_ptr + entry, mask=inside, other=1.0)
    tl.store(row_ptr + entry, tl.log(probability), mask=inside)
