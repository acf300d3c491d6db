"""Suffix lookup for the lowest level of a cascade; cascade/suffix_lookup.py launches the kernels.

Their rule is that of suffix_lookup.py. One program drafts for one request and one length
of the match: it finds where the last tokens of the text occur, in the request's own text, in shared
outputs or in a store, and follows the token that is seen there most often. The last kernel takes
the length, and then the text, that is expected to give most.
"""

import triton
import triton.language as tl

from vllm_hsd.kernels.texts import matched_tokens, searched_at, token_at

# What is found in each text begins at whole 16 bytes: rows for so many requests, or a multiple.
TEXT_ROWS = tl.constexpr(4)


@triton.jit
def match_text_kernel(
    matched_ptr,  # uint8 [B, width], tokens up to each one that end the request's text too
    longest_ptr,  # int32 [B, CHUNKS], the most of them
    window_ptr,  # int32 [B, capacity]
    window_stride,
    base_ptr,  # int64 [B]
    end_ptr,  # int32 [B]
    committed_ptr,  # int32 [B], tokens of the window that are committed
    requested_ptr,  # int32 [B], of level 0
    slot_ptr,  # int32 [B]
    text_ptr,  # int32 [max_num_reqs, max_model_len]
    text_stride,
    searched_ptr,  # int32 [width], the text of all requests to look in, or None for the own one
    width,  # max_model_len for that
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0)
    chunk = tl.program_id(1)
    base = tl.load(base_ptr + request)
    length = base + tl.load(end_ptr + request)
    committed = base + tl.load(committed_ptr + request) if searched_ptr is None else width
    position = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    matched = tl.zeros([CHUNK], tl.int32)
    if (tl.load(requested_ptr + request) > 0) & (chunk * CHUNK < committed):
        window_ptr += request * window_stride
        text_ptr += tl.load(slot_ptr + request).to(tl.int64) * text_stride
        most = tl.minimum(length, DEPTH) - 1
        going = position < committed
        matched = matched_tokens(
            window_ptr, text_ptr, base, length, position, going, most, CHUNK, searched_ptr
        )
    # Also of requests that draft nothing: the next kernel reads no more than this one writes.
    tl.store(longest_ptr + request * tl.num_programs(1) + chunk, tl.max(matched, axis=0))
    row_ptr = matched_ptr + request.to(tl.int64) * width
    tl.store(row_ptr + position, matched.to(tl.uint8), mask=position < width)


@triton.jit
def own_votes_kernel(
    expected_ptr,  # float32 [B, DEPTH - 1], sum of the shares, for each length of the match
    count_ptr,  # int32 [B, DEPTH - 1]
    token_ptr,  # int32 [B, DEPTH - 1, N]
    share_ptr,  # float32 [B, DEPTH - 1, N]
    place_ptr,  # int32 [B, DEPTH - 1, OCCURRENCES], where the text goes on after a match
    matched_ptr,  # uint8 [B, width]
    longest_ptr,  # int32 [B, CHUNKS]
    window_ptr,  # int32 [B, capacity]
    window_stride,
    base_ptr,  # int64 [B]
    committed_ptr,  # int32 [B]
    requested_ptr,  # int32 [B]
    slot_ptr,  # int32 [B]
    text_ptr,  # int32 [max_num_reqs, max_model_len]
    text_stride,
    searched_ptr,  # as above
    width,
    chunks,
    least_ptr,  # float64 [1], as below
    DEPTH: tl.constexpr,
    N: tl.constexpr,
    OCCURRENCES: tl.constexpr,
    PROBES: tl.constexpr,
    VOTERS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    request = tl.program_id(0)
    match = tl.program_id(1) + 1
    out = request * (DEPTH - 1) + match - 1
    room = tl.minimum(tl.load(requested_ptr + request), DEPTH - match)
    c = tl.arange(0, CHUNKS)
    longest = tl.load(longest_ptr + request * chunks + c, mask=c < chunks, other=0)
    count = tl.zeros((), tl.int32)
    drafted = tl.zeros((), tl.int32)
    expected = tl.zeros((), tl.float32)
    if (room > 0) & (tl.max(longest, axis=0) >= match):
        base = tl.load(base_ptr + request)
        committed = base + tl.load(committed_ptr + request) if searched_ptr is None else width
        window_ptr += request * window_stride
        text_ptr += tl.load(slot_ptr + request).to(tl.int64) * text_stride
        matched_ptr += request.to(tl.int64) * width
        place_ptr += out.to(tl.int64) * OCCURRENCES
        token_ptr += out.to(tl.int64) * N
        share_ptr += out.to(tl.int64) * N
        # The latest occurrences, the last one first.
        chunk = ((committed - 1) // CHUNK).to(tl.int32)
        while (chunk >= 0) & (count < OCCURRENCES):
            if tl.load(longest_ptr + request * chunks + chunk) >= match:
                at = chunk * CHUNK + tl.arange(0, CHUNK)
                tokens = tl.load(matched_ptr + at, mask=at < committed, other=0).to(tl.int32)
                here = (tokens >= match).to(tl.int32)
                number = tl.sum(here, axis=0)
                rank = count + number - tl.cumsum(here, axis=0)
                tl.store(place_ptr + rank, at + 1, mask=(here > 0) & (rank < OCCURRENCES))
                count += number
            chunk -= 1
        count = tl.minimum(count, OCCURRENCES)
        tl.debug_barrier()
        lane = tl.arange(0, OCCURRENCES)
        share = tl.full((), 1.0, tl.float32)
        floor = tl.maximum(tl.load(least_ptr).to(tl.float32), 1 / PROBES)
        while (drafted < room) & (count > 0):
            place = tl.load(place_ptr + lane, mask=lane < count, other=0)
            inside = (lane < count) & (place < committed)
            token = searched_at(searched_ptr, window_ptr, text_ptr, base, place, inside)
            votes = tl.zeros([OCCURRENCES], tl.int32)
            first = tl.zeros((), tl.int32)
            while first < count:
                voter = first + tl.arange(0, VOTERS)
                other = tl.load(place_ptr + voter, mask=voter < count, other=0)
                votes_too = (voter < count) & (other < committed)
                vote = searched_at(searched_ptr, window_ptr, text_ptr, base, other, votes_too)
                votes += tl.sum((token[:, None] == vote[None, :]).to(tl.int32), axis=1)
                first += VOTERS
            # Of equally many the lowest token.
            key = (votes.to(tl.int64) << 32) | (0x7FFFFFFF - token)
            best = tl.max(tl.where(token >= 0, key, 0), axis=0)
            won = (best >> 32).to(tl.int32)
            taken = (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32)
            share *= tl.div_rn(won.to(tl.float32), count.to(tl.float32))
            count = won
            # All have read the places.
            tl.debug_barrier()
            if share >= floor:
                tl.store(token_ptr + drafted, taken)
                tl.store(share_ptr + drafted, share)
                expected += share
                drafted += 1
                agrees = (token == taken).to(tl.int32)
                rank = tl.cumsum(agrees, axis=0) - 1
                tl.store(place_ptr + rank, place + 1, mask=agrees > 0)
            else:
                count = 0
            tl.debug_barrier()
    tl.store(expected_ptr + out, expected)
    tl.store(count_ptr + out, drafted)


@triton.jit
def _bound(
    store, low, high, wanted, match, AFTER: tl.constexpr, WAYS: tl.constexpr, DEPTH: tl.constexpr
):
    """First place of an order whose tokens do not come before the wanted ones, or with AFTER, come
    after them.

    `store`: pointers of tokens and order, number of tokens.
    """
    tokens_ptr, order_ptr, total = store
    way = tl.arange(0, WAYS)
    offset = tl.arange(0, DEPTH)
    compared = offset < match
    while low < high:
        index = low + (high - low) * (way + 1) // (WAYS + 1)
        at = tl.load(order_ptr + index)[:, None] + offset[None, :]
        here = tl.load(tokens_ptr + at, mask=compared[None, :] & (at < total), other=-1)
        differs = compared[None, :] & (here != wanted[None, :])
        first = tl.min(tl.where(differs, offset[None, :], DEPTH), axis=1)
        side = tl.where(here < wanted[None, :], -1, 1)
        side = tl.sum(tl.where(offset[None, :] == first[:, None], side, 0), axis=1)
        is_before = side <= 0 if AFTER else side < 0
        before = tl.sum(is_before.to(tl.int32), axis=0)
        size = high - low
        high = tl.where(before < WAYS, low + size * (before + 1) // (WAYS + 1), high)
        low = tl.where(before > 0, low + size * before // (WAYS + 1) + 1, low)
    return low


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def store_votes_kernel(
    expected_ptr,  # float32 [B, DEPTH - 1]
    count_ptr,  # int32 [B, DEPTH - 1]
    token_ptr,  # int32 [B, DEPTH - 1, N]
    share_ptr,  # float32 [B, DEPTH - 1, N]
    tokens_ptr,  # int32 [total], texts of the store
    order_ptr,  # int32 [size]
    window_ptr,  # int32 [B, capacity]
    window_stride,
    base_ptr,  # int64 [B]
    end_ptr,  # int32 [B]
    requested_ptr,  # int32 [B]
    slot_ptr,  # int32 [B]
    text_ptr,  # int32 [max_num_reqs, max_model_len]
    text_stride,
    total,
    size,
    least_ptr,  # float64 [1], as below
    DEPTH: tl.constexpr,
    N: tl.constexpr,
    PROBES: tl.constexpr,
    WAYS: tl.constexpr,
    HEAD: tl.constexpr,
):
    request = tl.program_id(0)
    match = tl.program_id(1) + 1
    out = request * (DEPTH - 1) + match - 1
    length = tl.load(base_ptr + request) + tl.load(end_ptr + request)
    room = tl.minimum(tl.load(requested_ptr + request), DEPTH - match)
    drafted = tl.zeros((), tl.int32)
    expected = tl.zeros((), tl.float32)
    if (room > 0) & (match < length):
        base = tl.load(base_ptr + request)
        window_ptr += request * window_stride
        text_ptr += tl.load(slot_ptr + request).to(tl.int64) * text_stride
        token_ptr += out.to(tl.int64) * N
        share_ptr += out.to(tl.int64) * N
        # Most matches are not there, which their first tokens tell.
        short = tl.minimum(match, HEAD)
        offset = tl.arange(0, HEAD)
        at = length - match + offset
        head = token_at(window_ptr, text_ptr, base, at, offset < short)
        low = tl.zeros((), tl.int32)
        high = low + size
        store = tokens_ptr, order_ptr, total
        low = _bound(store, low, high, head, short, False, WAYS, HEAD)
        # The place after the first one, if that has them.
        second = tl.minimum(low + 1, high)
        second = _bound(store, low, second, head, short, True, WAYS, HEAD)
        if second > low:
            high = _bound(store, second, high, head, short, True, WAYS, HEAD)
            if match > HEAD:
                place = tl.arange(0, DEPTH)
                at_all = length - match + place
                whole = token_at(window_ptr, text_ptr, base, at_all, place < match)
                low = _bound(store, low, high, whole, match, False, WAYS, DEPTH)
                high = _bound(store, low, high, whole, match, True, WAYS, DEPTH)
        else:
            high = low
        lane = tl.arange(0, PROBES)
        share = tl.full((), 1.0, tl.float32)
        floor = tl.maximum(tl.load(least_ptr).to(tl.float32), 1 / PROBES)
        while (drafted < room) & (low < high):
            text_at = tokens_ptr + match + drafted
            gap = (high - low + PROBES - 1) // PROBES
            index = low + lane * gap
            there = index < high
            token = tl.load(text_at + tl.load(order_ptr + index, mask=there, other=0), mask=there)
            left, right = index - gap, index + gap
            has_left, has_right = there & (lane > 0), there & (right < high)
            one = tl.load(order_ptr + left, mask=has_left, other=0)
            one = tl.load(text_at + one, mask=has_left, other=-2)
            other = tl.load(order_ptr + right, mask=has_right, other=0)
            other = tl.load(text_at + other, mask=has_right, other=-2)
            is_first, is_last = there & (one != token), there & (other != token)
            # Between two probes with different tokens each run ends: two searches, a lane each.
            a = tl.where(is_first, tl.maximum(left + 1, low), index)
            b = index
            while tl.max(b - a, axis=0) > 0:
                middle = (a + b) // 2
                found = tl.load(order_ptr + middle, mask=is_first, other=0)
                same = tl.load(text_at + found, mask=is_first, other=-2) == token
                b = tl.where(same, middle, b)
                a = tl.where(same | (is_first == 0), a, middle + 1)
            begin = tl.associative_scan(tl.where(is_first, b, 0), 0, _larger)
            a = index + 1
            b = tl.where(is_last, tl.minimum(right, high), a)
            while tl.max(b - a, axis=0) > 0:
                middle = (a + b) // 2
                # A search that has ended may be past the last of all places.
                under_way = a < b
                found = tl.load(order_ptr + middle, mask=under_way, other=0)
                same = tl.load(text_at + found, mask=under_way, other=-2) == token
                a = tl.where(under_way & same, middle + 1, a)
                b = tl.where(under_way & (same == 0), middle, b)
            votes = tl.where(is_last & (token >= 0), a - begin, 0).to(tl.int64)
            # Of equally many the lowest token.
            best = tl.max(votes * PROBES + (PROBES - 1 - lane), axis=0)
            won = (best // PROBES).to(tl.int32)
            winner = lane == PROBES - 1 - best % PROBES
            taken = tl.max(tl.where(winner, token, -1), axis=0)
            share *= tl.div_rn(won.to(tl.float32), (high - low).to(tl.float32))
            low = tl.max(tl.where(winner, begin, 0), axis=0)
            high = low + won
            if share >= floor:
                tl.store(token_ptr + drafted, taken)
                tl.store(share_ptr + drafted, share)
                expected += share
                drafted += 1
            else:
                high = low
    tl.store(expected_ptr + out, expected)
    tl.store(count_ptr + out, drafted)


@triton.jit
def take_draft_kernel(
    offered_ptr,  # int32 [SOURCES, B, N], what each text offers
    offers_ptr,  # int32 [SOURCES, B], how many tokens
    confidence_ptr,  # float64 [SOURCES, B, N]
    window_ptr,  # int32 [B, capacity]
    window_stride,
    end_ptr,  # int32 [B]
    drafted_ptr,  # int32 [B], of level 0
    expected_ptr,  # float32 [SOURCES, padded B, DEPTH - 1], see TEXT_ROWS
    count_ptr,  # int32 [SOURCES, padded B, DEPTH - 1]
    token_ptr,  # int32 [SOURCES, padded B, DEPTH - 1, N]
    share_ptr,  # float32 [SOURCES, padded B, DEPTH - 1, N]
    least_ptr,  # float64 [1], confidence below which nothing is drafted
    SOURCES: tl.constexpr,
    DEPTH: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,
):
    request = tl.program_id(0)
    lane = tl.arange(0, LANES)
    length = tl.arange(0, DEPTH)
    least = tl.load(least_ptr)
    drafted = tl.zeros((), tl.int32)
    taken = tl.zeros([LANES], tl.int32)
    most = tl.zeros((), tl.float64)
    for source in tl.static_range(SOURCES):
        place = source * tl.num_programs(0) + request
        found = source * (tl.cdiv(tl.num_programs(0), TEXT_ROWS) * TEXT_ROWS) + request
        row = found.to(tl.int64) * (DEPTH - 1)
        expected = tl.load(expected_ptr + row + length, mask=length < DEPTH - 1, other=-1.0)
        # The longest match of those that give as much.
        best = tl.max(tl.where(expected == tl.max(expected, axis=0), length, 0), axis=0)
        known = lane < tl.load(count_ptr + row + best)
        at = (row + best) * N + lane
        token = tl.load(token_ptr + at, mask=known, other=0)
        share = tl.load(share_ptr + at, mask=known, other=0.0).to(tl.float64)
        # `tools.planner.suffix_level.acceptance`.
        match = (best + 1).to(tl.float64)
        last = match + lane.to(tl.float64)
        if source == 0:
            confidence = share * ((match + 1) / (last + 2))
        else:
            before = match * (match + 1) * (match + 2) * (match + 3)
            confidence = share * (before / ((last + 1) * (last + 2) * (last + 3) * (last + 4)))
        known = known & (confidence >= least)
        count = tl.sum(known.to(tl.int32), axis=0)
        confidence = tl.where(known, confidence, 0.0)
        tl.store(offers_ptr + place, count)
        at = place.to(tl.int64) * N + lane
        tl.store(offered_ptr + at, tl.where(known, token, 0), mask=lane < N)
        tl.store(confidence_ptr + at, confidence, mask=lane < N)
        total = tl.sum(confidence, axis=0)
        better = total > most
        most = tl.where(better, total, most)
        drafted = tl.where(better, count, drafted)
        taken = tl.where(better, token, taken)
    end = tl.load(end_ptr + request)
    tl.store(window_ptr + request * window_stride + end + lane, taken, mask=lane < drafted)
    tl.store(end_ptr + request, end + drafted)
    tl.store(drafted_ptr + request, drafted)
