"""Rows of an n-gram language model as logits; cascade/ngram_rows.py launches the kernels.

cascade/ngram_model.py is their rule in plain numpy. What follows a context in the store lies in one
interval of the order of its texts, and in it every distinct token is one run
(cascade/text_order.py). Loads that wait for each other are few: intervals are searched at many
places at once, both ends and all contexts together, and each kernel takes up what the programs of
the one before have found.
"""

import triton
import triton.language as tl

from vllm_hsd.kernels.suffix_kernels import token_at

AFTER_ALL_TOKENS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _part(size, number, WAYS: tl.constexpr):
    """Where part `number` of WAYS + 1 of so many places begins, within 32 bits."""
    return size // (WAYS + 1) * number + size % (WAYS + 1) * number // (WAYS + 1)


@triton.jit
def _narrowed(low, high, below, WAYS: tl.constexpr):
    """The part of each interval that is left if so many of its WAYS places are too low."""
    size = high - low
    some, most = (size > 0) & (below > 0), (size > 0) & (below < WAYS)
    left = tl.where(some, low + _part(size, below, WAYS) + 1, low)
    return left, tl.where(most, low + _part(size, below + 1, WAYS), high)


@triton.jit
def _first_not_below(values_ptr, low, high, wanted, WAYS: tl.constexpr):
    """First places, low to high - 1, of ascending numbers that are not below the wanted ones.

    Of any shape, all searched together.
    """
    number = tl.arange(0, WAYS) + 1
    while tl.max(high - low) > 0:
        size = tl.expand_dims(high - low, -1)
        index = tl.expand_dims(low, -1) + _part(size, number, WAYS)
        value = tl.load(values_ptr + index, mask=size > 0, other=0)
        below = tl.sum((value < tl.expand_dims(wanted, -1)).to(tl.int32), axis=-1)
        low, high = _narrowed(low, high, below, WAYS)
    return low


@triton.jit
def _first_text_not_before(
    tokens_ptr, order_ptr, wanted, number, total, size, WAYS: tl.constexpr, DEPTH: tl.constexpr
):
    """First places of an order whose first tokens do not come before the wanted ones: int32 [2].

    Args:
        wanted: int32 [2, DEPTH], of which `number` are compared.
    """
    way = tl.arange(0, WAYS) + 1
    offset = tl.arange(0, DEPTH)[None, None, :]
    low = tl.zeros([2], tl.int32)
    high = low + size
    while tl.max(high - low) > 0:
        width = (high - low)[:, None]
        index = low[:, None] + _part(width, way[None, :], WAYS)
        at = tl.load(order_ptr + index, mask=width > 0, other=0)[:, :, None] + offset
        here = tl.load(tokens_ptr + at, mask=(offset < number) & (at < total), other=-1)
        differs = (offset < number) & (here != wanted[:, None, :])
        first = tl.min(tl.where(differs, offset, DEPTH), axis=2)
        before = (offset == first[:, :, None]) & (here < wanted[:, None, :])
        below = tl.sum(tl.sum(before.to(tl.int32), axis=2), axis=1)
        low, high = _narrowed(low, high, below, WAYS)
    return low


@triton.jit
def _text_of(
    row,
    window_ptr,
    window_stride,
    base_ptr,
    end_ptr,
    start_ptr,
    slot_ptr,
    text_ptr,
    text_stride,
    VERIFIES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Pointers, base and length of a row's text as `token_at` takes them; no tokens in padding."""
    request = row // ROWS
    slot = tl.load(slot_ptr + request).to(tl.int64)
    end = tl.load(end_ptr + request)
    if VERIFIES:
        # Nothing is kept of rows past a draft.
        end = tl.minimum(tl.load(start_ptr + request) + row % ROWS, end)
    base = tl.load(base_ptr + request)
    length = tl.where(slot >= 0, base + end, 0)
    window_ptr += request.to(tl.int64) * window_stride
    return window_ptr, text_ptr + tl.maximum(slot, 0) * text_stride, base, length


@triton.jit
def _runs_after(run_ptr, row, k, ORDER: tl.constexpr):
    """First runs after the last k tokens of a row's text, and their ends; none for other k."""
    run_ptr += (row * ORDER + k - 1) * 2
    context = (k > 0) & (k <= ORDER)
    return tl.load(run_ptr, mask=context, other=0), tl.load(run_ptr + 1, mask=context, other=0)


@triton.jit
def ngram_search_kernel(
    run_ptr,  # int32 [R, ORDER, 2], first run of tokens seen after the last 1, 2, ..., and the end
    seen_ptr,  # int32 [R, ORDER], how many there are
    place_ptr,  # int32 [R, CHUNKS, OCCURRENCES], of the last token in the own text, latest first
    number_ptr,  # int32 [R, CHUNKS], how many there are
    tokens_ptr,  # int32 [total], texts of the store
    order_ptr,  # int32 [size]
    starts_ptr,  # int32, runs of 2, 3, ... tokens, see ngram_rows.Runs
    offset_ptr,  # int32 [ORDER + 1]
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
    VERIFIES: tl.constexpr,
    ROWS: tl.constexpr,  # for each request
    ORDER: tl.constexpr,
    DEPTH: tl.constexpr,  # lanes of a context and a token
    OCCURRENCES: tl.constexpr,
    WAYS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Programs of a row: one for each context in the store, then one for each chunk of the text."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    window_ptr, text_ptr, base, length = _text_of(
        row,
        window_ptr,
        window_stride,
        base_ptr,
        end_ptr,
        start_ptr,
        slot_ptr,
        text_ptr,
        text_stride,
        VERIFIES,
        ROWS,
    )
    if part < ORDER:
        k = part + 1
        side = tl.arange(0, 2)
        run = tl.zeros([2], tl.int32)
        seen = tl.zeros((), tl.int32)
        if length >= k:
            offset = tl.arange(0, DEPTH)
            context = token_at(window_ptr, text_ptr, base, length - k + offset, offset < k)
            # Nothing follows where a text ends, which is before all tokens.
            edge = tl.where(side == 0, 0, AFTER_ALL_TOKENS)[:, None]
            wanted = tl.where(offset[None, :] < k, context[None, :], edge)
            bound = _first_text_not_before(
                tokens_ptr, order_ptr, wanted, k + 1, total, size, WAYS, DEPTH
            )
            seen = tl.sum(tl.where(side == 0, -bound, bound), axis=0)
            edges = tl.load(offset_ptr + part + side)
            low = tl.min(edges, axis=0) + tl.zeros([2], tl.int32)
            # After the runs of k + 1 tokens stands the order's size.
            high = tl.max(edges, axis=0) - 1 + tl.zeros([2], tl.int32)
            run = _first_not_below(starts_ptr, low, high, bound, WAYS)
        tl.store(run_ptr + (row * ORDER + part) * 2 + side, run)
        tl.store(seen_ptr + row * ORDER + part, seen)
    else:
        chunk = part - ORDER
        first = chunk.to(tl.int64) * CHUNK
        out = row.to(tl.int64) * (tl.num_programs(1) - ORDER) + chunk
        number = tl.zeros((), tl.int32)
        if first < length - 1:
            last = token_at(window_ptr, text_ptr, base, length - 1, True)
            at = first + tl.arange(0, CHUNK)
            token = token_at(window_ptr, text_ptr, base, at, at < length - 1)
            here = (token == last).to(tl.int32)
            number = tl.sum(here, axis=0)
            rank = number - tl.cumsum(here, axis=0)
            kept = (here > 0) & (rank < OCCURRENCES)
            tl.store(place_ptr + out * OCCURRENCES + rank, at.to(tl.int32), mask=kept)
        tl.store(number_ptr + out, number)


@triton.jit
def ngram_own_kernel(
    token_ptr,  # int32 [R, OCCURRENCES], different tokens seen in the request's own text, or -1
    times_ptr,  # int32 [R, OCCURRENCES, ORDER], how often; below 0 if never in the store
    run_ptr,  # int32 [R, ORDER, 2]
    last_ptr,  # int32, last token of each run
    place_ptr,  # int32 [R, chunks, OCCURRENCES]
    number_ptr,  # int32 [R, chunks]
    chunks,
    window_ptr,  # int32 [B, capacity]
    window_stride,
    base_ptr,  # int64 [B]
    end_ptr,  # int32 [B]
    start_ptr,  # int32 [B]
    slot_ptr,  # int32 [B]
    text_ptr,  # int32 [max_num_reqs, max_model_len]
    text_stride,
    VERIFIES: tl.constexpr,
    ROWS: tl.constexpr,
    ORDER: tl.constexpr,
    DEPTH: tl.constexpr,
    OCCURRENCES: tl.constexpr,
    OWNERS: tl.constexpr,  # occurrences whose tokens a program counts among all
    WAYS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,  # whose occurrences are taken at once
):
    row = tl.program_id(0)
    window_ptr, text_ptr, base, length = _text_of(
        row,
        window_ptr,
        window_stride,
        base_ptr,
        end_ptr,
        start_ptr,
        slot_ptr,
        text_ptr,
        text_stride,
        VERIFIES,
        ROWS,
    )
    lane = tl.arange(0, OCCURRENCES)
    owner = tl.program_id(1) * OWNERS + tl.arange(0, OWNERS)
    number_ptr += row.to(tl.int64) * chunks
    place_ptr += row.to(tl.int64) * chunks * OCCURRENCES
    count = tl.zeros((), tl.int32)
    index = tl.zeros([OCCURRENCES], tl.int32)
    chunk = (tl.maximum(length - 2, 0) // CHUNK).to(tl.int32)
    while (chunk >= 0) & (count < OCCURRENCES):
        one = chunk - tl.arange(0, CHUNKS)
        number = tl.load(number_ptr + one, mask=one >= 0, other=0)
        rank = lane[:, None] - (count + tl.cumsum(number, axis=0) - number)[None, :]
        here = (rank >= 0) & (rank < number[None, :])
        index += tl.sum(tl.where(here, one[None, :] * OCCURRENCES + rank, 0), axis=1)
        count += tl.sum(number, axis=0)
        chunk -= CHUNKS
    kept = tl.full([OWNERS], -1, tl.int32)
    if tl.program_id(1) * OWNERS < count:
        # Columns: the next token, then the last 1, 2, ... tokens before it.
        k = tl.arange(0, DEPTH)
        context = (k > 0) & (k <= ORDER)
        known = lane < count
        place = tl.load(place_ptr + index, mask=known, other=0).to(tl.int64)
        at = place[:, None] + 1 - k[None, :]
        inside = known[:, None] & (k <= ORDER)[None, :] & (at >= 0)
        found = token_at(window_ptr, text_ptr, base, at, inside)
        ends = token_at(window_ptr, text_ptr, base, length - k, context & (k <= length))
        differs = (k > 0)[None, :] & ((inside == 0) | (found != ends[None, :]))
        matched = tl.min(tl.where(differs, k[None, :], ORDER + 1), axis=1) - 1
        token = tl.sum(tl.where(k[None, :] == 0, found, 0), axis=1)
        mine = tl.sum(tl.where(owner[:, None] == lane[None, :], token[None, :], 0), axis=1)
        same = known[None, :] & (mine[:, None] == token[None, :])
        # Each token once, for the first of its places.
        earlier = tl.max((same & (lane[None, :] < owner[:, None])).to(tl.int32), axis=1)
        first = (owner < count) & (earlier == 0)
        times = tl.zeros([OWNERS, DEPTH], tl.int32)
        for j in tl.static_range(1, ORDER + 1):
            agree = tl.sum((same & (matched >= j)[None, :]).to(tl.int32), axis=1)
            times = tl.where(k[None, :] == j, agree[:, None], times)
        begin, stop = _runs_after(run_ptr, row, k, ORDER)
        needed = first[:, None] & (times > 0)
        high = tl.where(needed, stop[None, :], 0)
        low = tl.where(needed, begin[None, :], 0)
        wanted = mine[:, None] + tl.zeros([OWNERS, DEPTH], tl.int32)
        low = _first_not_below(last_ptr, low, high, wanted, WAYS)
        there = needed & (low < high)
        there = there & (tl.load(last_ptr + low, mask=there, other=-1) == mine[:, None])
        out = row.to(tl.int64) * OCCURRENCES + owner
        tl.store(
            times_ptr + out[:, None] * ORDER + k[None, :] - 1,
            tl.where(there, times, -times),
            mask=first[:, None] & context[None, :],
        )
        kept = tl.where(first, mine, -1)
    tl.store(token_ptr + row.to(tl.int64) * OCCURRENCES + owner, kept)


@triton.jit
def _shares(number, distinct, k, ORDER: tl.constexpr, DEPTH: tl.constexpr):
    """Share of a token once seen after k tokens, float64 [DEPTH], and of the single tokens.

    Args:
        number, distinct: float64 [DEPTH], tokens seen there, each with its weight, and how many
            differ.
    """
    shares = tl.zeros([DEPTH], tl.float64)
    rest = tl.full((), 1.0, tl.float64)
    for i in tl.static_range(ORDER):
        here = k == ORDER - i
        whole = tl.sum(tl.where(here, number, 0.0), axis=0)
        different = tl.sum(tl.where(here, distinct, 0.0), axis=0)
        share = tl.where(whole > 0, rest / tl.where(whole > 0, whole + different, 1.0), 0.0)
        shares = tl.where(here, share, shares)
        rest = tl.where(whole > 0, share * different, rest)
    return shares, rest


@triton.jit
def ngram_rows_kernel(
    row_ptr,  # float32 [R, V], logarithms of the probabilities
    run_ptr,  # int32 [R, ORDER, 2]
    seen_ptr,  # int32 [R, ORDER]
    token_ptr,  # int32 [R, OCCURRENCES]
    times_ptr,  # int32 [R, OCCURRENCES, ORDER]
    single_ptr,  # float32 [V]
    starts_ptr,  # int32
    last_ptr,  # int32
    own_weight_ptr,  # float64 [1], of an occurrence in the own text
    vocab_size,
    ORDER: tl.constexpr,
    DEPTH: tl.constexpr,
    OCCURRENCES: tl.constexpr,
    LANES: tl.constexpr,
    WAYS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * CHUNK
    last = tl.minimum(first + CHUNK, vocab_size)
    k = tl.arange(0, DEPTH)
    context = (k > 0) & (k <= ORDER)
    begin, stop = _runs_after(run_ptr, row, k, ORDER)
    seen = tl.load(seen_ptr + row * ORDER + k - 1, mask=context, other=0)
    place = row * OCCURRENCES + tl.arange(0, OCCURRENCES)
    own = tl.load(token_ptr + place)
    times = tl.load(
        times_ptr + place[:, None] * ORDER + k[None, :] - 1,
        mask=(own >= 0)[:, None] & context[None, :],
        other=0,
    )
    weights = tl.load(own_weight_ptr) * tl.abs(times).to(tl.float64)
    number = seen + tl.sum(weights, axis=0)
    distinct = (stop - begin + tl.sum((times < 0).to(tl.int32), axis=0)).to(tl.float64)
    shares, rest = _shares(number, distinct, k, ORDER, DEPTH)
    own_weight = tl.sum(weights * shares[None, :], axis=1).to(tl.float32)
    shares = shares.to(tl.float32)
    row_ptr += row * vocab_size
    entry = first + tl.arange(0, CHUNK)
    inside = entry < vocab_size
    single = tl.load(single_ptr + entry, mask=inside, other=0.0)
    tl.store(row_ptr + entry, rest.to(tl.float32) * single, mask=inside)
    # The runs of this chunk; those of all chunks are in the order of their tokens.
    side = tl.arange(0, 2)[None, :]
    none = tl.zeros([DEPTH, 2], tl.int32)
    edge = none + tl.where(side == 0, first, last)
    edge = _first_not_below(last_ptr, begin[:, None] + none, stop[:, None] + none, edge, WAYS)
    begin = tl.sum(tl.where(side == 0, edge, 0), axis=1)
    runs = tl.sum(tl.where(side == 0, -edge, edge), axis=1)
    # All contexts' one after another.
    before = tl.cumsum(runs, axis=0) - runs
    total = tl.sum(runs, axis=0)
    done = tl.zeros((), tl.int32)
    while done < total:
        lane = done + tl.arange(0, LANES)
        run = tl.zeros([LANES], tl.int32)
        length = tl.zeros([LANES], tl.int32)
        share = tl.zeros([LANES], tl.float32)
        for j in tl.static_range(1, ORDER + 1):
            # Those of longer contexts overwrite what is past its end.
            rank = lane - tl.sum(tl.where(k == j, before, 0), axis=0)
            run = tl.where(rank >= 0, tl.sum(tl.where(k == j, begin, 0), axis=0) + rank, run)
            length = tl.where((rank >= 0) & (lane < total), j, length)
            share = tl.where(rank >= 0, tl.sum(tl.where(k == j, shares, 0.0), axis=0), share)
        token = tl.load(last_ptr + run, mask=lane < total, other=0)
        often = tl.load(starts_ptr + run + 1, mask=lane < total, other=0)
        often -= tl.load(starts_ptr + run, mask=lane < total, other=0)
        for j in tl.static_range(1, ORDER + 1):
            # Different tokens after one context, but not after all.
            if tl.max((length == j).to(tl.int32), axis=0) > 0:
                tl.debug_barrier()
                entries = row_ptr + token
                probability = tl.load(entries, mask=length == j, other=0.0)
                tl.store(entries, probability + share * often.to(tl.float32), mask=length == j)
        done += LANES
    here = (own >= first) & (own < last)
    tl.debug_barrier()
    probability = tl.load(row_ptr + own, mask=here, other=0.0)
    tl.store(row_ptr + own, probability + own_weight, mask=here)
    tl.debug_barrier()
    probability = tl.load(row_ptr + entry, mask=inside, other=1.0)
    tl.store(row_ptr + entry, tl.log(probability), mask=inside)
