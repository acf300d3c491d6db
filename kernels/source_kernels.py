"""The choice between several lookups on the device; budget/source_choice.py launches the kernels.

`tools.planner.lookup_choice` for tensors: what became of the last offers, what the lookups offer
now, and which of the offers is drafted. S lookups, places and bins as in `budget.acceptance`. The
last slot is of rows that draft nothing.
"""

import triton
import triton.language as tl

from vllm_hsd.kernels.blocks import extract_lane, times
from vllm_hsd.kernels.texts import token_at


@triton.jit
def slot_of(slot_ptr, requested_ptr, request, slots):
    """The request's slot, the one after all others where it drafts nothing."""
    slot = tl.load(slot_ptr + request)
    return tl.where(tl.load(requested_ptr + request) > 0, slot, slots).to(tl.int64)


@triton.jit
def _group(estimate, lane, PLACES: tl.constexpr, BINS: tl.constexpr):
    """Place and bin of a token's estimate as one number."""
    bin_of = tl.minimum((estimate * BINS).to(tl.int32), BINS - 1)
    return tl.minimum(lane, PLACES - 1) * BINS + bin_of


@triton.jit
def judge_offers_kernel(
    counted_ptr,  # int32 [2, S, PLACES * BINS], accepted and verified tokens of this launch
    own_ptr,  # float64 [2, S, slots + 1]
    start_ptr,  # int64 [slots + 1], where the last offers begin
    count_ptr,  # int32 [S, slots + 1]
    token_ptr,  # int32 [S, slots + 1, N]
    estimate_ptr,  # float64 [S, slots + 1, N]
    expected_ptr,  # float64 [S, slots + 1, N]
    memory_ptr,  # float64 [1], decay with each draft
    window_ptr,  # int32 [B, capacity]
    window_stride,
    base_ptr,  # int64 [B]
    end_ptr,  # int32 [B]
    requested_ptr,  # int32 [B], of the top level
    slot_ptr,  # int32 [B]
    text_ptr,  # int32 [max_num_reqs, max_model_len]
    text_stride,
    slots,
    N: tl.constexpr,
    LANES: tl.constexpr,
    PLACES: tl.constexpr,
    BINS: tl.constexpr,
):
    request = tl.program_id(0)
    source = tl.program_id(1)
    slot = slot_of(slot_ptr, requested_ptr, request, slots)
    base = tl.load(base_ptr + request)
    start = tl.load(start_ptr + slot)
    place = source.to(tl.int64) * (slots + 1) + slot
    # A text that ends where the offer began or before has changed before the offer.
    known = tl.load(end_ptr + request) + base - start
    known = tl.minimum(tl.load(count_ptr + place).to(tl.int64), known)
    if (slot < slots) & (known > 0):
        lane = tl.arange(0, LANES)
        offered = lane < known
        at = start + lane
        own_window, own_text = window_ptr + request * window_stride, text_ptr + slot * text_stride
        here = token_at(own_window, own_text, base, at, offered)
        token = tl.load(token_ptr + place * N + lane, mask=offered, other=0)
        same = offered & (here == token)
        matched = tl.min(tl.where(same, LANES, lane), axis=0)
        # Whole drafts of as many tokens as there are lanes have no place after them.
        matched = tl.minimum(matched.to(tl.int64), known)
        tried = lane < tl.minimum(matched + 1, known)
        at = place * N + lane
        estimate = tl.load(estimate_ptr + at, mask=tried, other=0.0)
        expected = tl.sum(tl.load(expected_ptr + at, mask=tried, other=0.0), axis=0)
        number = tl.num_programs(1)
        total = number.to(tl.int64) * (slots + 1)
        memory = tl.load(memory_ptr)
        tl.store(own_ptr + place, tl.load(own_ptr + place) * memory + matched.to(tl.float64))
        own = tl.load(own_ptr + total + place)
        tl.store(own_ptr + total + place, own * memory + expected)
        group = source * (PLACES * BINS) + _group(estimate, lane, PLACES, BINS)
        one = tl.full([LANES], 1, tl.int32)
        tl.atomic_add(counted_ptr + group, one, mask=tried & (lane < matched), sem="relaxed")
        group += number * (PLACES * BINS)
        tl.atomic_add(counted_ptr + group, one, mask=tried, sem="relaxed")


@triton.jit
def learn_kernel(
    shared_ptr,  # float64 [2, S, PLACES, BINS]
    counted_ptr,  # int32 [2, S, PLACES * BINS], zero afterwards
    remembered_ptr,  # float64 [1], tokens that a place remembers
    PLACES: tl.constexpr,
    BINS: tl.constexpr,
):
    source = tl.program_id(0)
    at = tl.arange(0, PLACES)[:, None] * BINS + tl.arange(0, BINS)[None, :]
    at += source * (PLACES * BINS)
    verified_at = at + tl.num_programs(0) * (PLACES * BINS)
    accepted = tl.load(shared_ptr + at) + tl.load(counted_ptr + at).to(tl.float64)
    verified = tl.load(shared_ptr + verified_at) + tl.load(counted_ptr + verified_at).to(tl.float64)
    most = tl.load(remembered_ptr)
    kept = most / tl.maximum(tl.sum(verified, axis=1), most)
    tl.store(shared_ptr + at, accepted * kept[:, None])
    tl.store(shared_ptr + verified_at, verified * kept[:, None])
    tl.store(counted_ptr + at, tl.zeros([PLACES, BINS], tl.int32))
    tl.store(counted_ptr + verified_at, tl.zeros([PLACES, BINS], tl.int32))


@triton.jit
def keep_offer_kernel(
    start_ptr,  # int64 [slots + 1]
    count_ptr,  # int32 [slots + 1], of this source, as the next three
    token_ptr,  # int32 [slots + 1, N]
    estimate_ptr,  # float64 [slots + 1, N]
    expected_ptr,  # float64 [slots + 1, N]
    shared_ptr,  # float64 [PLACES * BINS], accepted tokens of this source
    verified_ptr,  # float64 [PLACES * BINS]
    prior_ptr,  # float64 [1], tokens that a bin begins with
    window_ptr,  # int32 [B, capacity]
    window_stride,
    base_ptr,  # int64 [B]
    end_ptr,  # int32 [B], with what the lookup has appended; without it afterwards
    drafted_ptr,  # int32 [B], of level 0; 0 afterwards
    requested_ptr,  # int32 [B], of the top level
    slot_ptr,  # int32 [B]
    slots,
    own_ptr,  # float64 [TEXTS, B, N] confidences, [N] by place, or [V] by the token before
    TEXTS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,
    PLACES: tl.constexpr,
    BINS: tl.constexpr,
):
    request = tl.program_id(0)
    slot = slot_of(slot_ptr, requested_ptr, request, slots)
    count = tl.load(drafted_ptr + request)
    end = tl.load(end_ptr + request) - count
    lane = tl.arange(0, LANES)
    known = lane < count
    at = window_ptr + request * window_stride + end + lane
    token = tl.load(at, mask=known, other=0)
    if TEXTS > 0:
        estimate = tl.zeros([LANES], tl.float64)
        most = tl.full((), -1.0, tl.float64)
        for text in tl.static_range(TEXTS):
            row_ptr = own_ptr + (text * tl.num_programs(0) + request).to(tl.int64) * N
            confidence = tl.load(row_ptr + lane, mask=lane < N, other=0.0)
            before = tl.load(row_ptr + lane - 1, mask=(lane > 0) & (lane < N), other=1.0)
            total = tl.sum(confidence, axis=0)
            each = tl.where(before > 0, confidence / tl.where(before > 0, before, 1.0), confidence)
            estimate = tl.where(total > most, each, estimate)
            most = tl.maximum(most, total)
        estimate = tl.where(known, estimate, 0.0)
    elif BY_TOKEN:
        last = tl.load(at - 1, mask=known, other=0)
        estimate = tl.load(own_ptr + last, mask=known, other=0.0)
    else:
        # Also of tokens that were not drafted: see `best_offer`.
        estimate = tl.load(own_ptr + lane, mask=lane < N, other=0.0)
    group = _group(estimate, lane, PLACES, BINS)
    prior = tl.load(prior_ptr)
    accepted = tl.load(shared_ptr + group) + prior * estimate
    expected = accepted / (tl.load(verified_ptr + group) + prior)
    place = slot * N + lane
    tl.store(token_ptr + place, token, mask=lane < N)
    tl.store(estimate_ptr + place, estimate, mask=lane < N)
    tl.store(expected_ptr + place, expected, mask=lane < N)
    tl.store(count_ptr + slot, count)
    tl.store(start_ptr + slot, tl.load(base_ptr + request) + end)
    tl.store(end_ptr + request, end)
    tl.store(drafted_ptr + request, 0)


@triton.jit
def best_offer(
    offers,
    slot,
    slots,
    room,
    firsts,
    SOURCES: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,
    WHOLE: tl.constexpr = False,
):
    """(source or -1, tokens that are worth drafting, all [LANES]) of the best offer.

    The one of most tokens that are expected to be accepted, of those that begin with no token of
    the tensor `firsts`. Of equals the last one; no offer is chosen for nothing. `offers` are the
    pointers from own to least of the kernel. WHOLE: as if the last source, whose tokens are
    expected by their places alone, had offered N.
    """
    own_ptr, count_ptr, token_ptr, expected_ptr, prior_ptr, least_ptr = offers
    prior, least = tl.load(prior_ptr), tl.load(least_ptr)
    lane = tl.arange(0, LANES)
    chosen = tl.full((), -1, tl.int32)
    count = tl.zeros((), tl.int32)
    taken = tl.zeros([LANES], tl.int32)
    most = tl.zeros((), tl.float64)
    for source in tl.static_range(SOURCES):
        place = source * (slots + 1) + slot
        accepted = tl.load(own_ptr + place) + prior
        scale = accepted / (tl.load(own_ptr + SOURCES * (slots + 1) + place) + prior)
        offered = tl.load(count_ptr + place)
        if WHOLE and source == SOURCES - 1:
            offered = N
        within = lane < tl.minimum(offered, room)
        expected = tl.load(expected_ptr + place * N + lane, mask=within, other=0.0)
        survival = tl.associative_scan(tl.minimum(expected * scale, 1.0), 0, times)
        within = within & (survival >= least)
        value = tl.sum(tl.where(within, survival, 0.0), axis=0)
        token = tl.load(token_ptr + place * N + lane, mask=within, other=0)
        known = tl.sum((firsts == extract_lane(token, lane, 0)).to(tl.int32), axis=0)
        better = (value >= most) & (value > 0) & (known == 0)
        number = tl.sum((within & (survival > 0)).to(tl.int32), axis=0)
        most = tl.where(better, value, most)
        chosen = tl.where(better, source, chosen)
        count = tl.where(better, number, count)
        taken = tl.where(better, token, taken)
    return chosen, count, taken


@triton.jit
def choose_offer_kernel(
    window_ptr,  # int32 [B, capacity]
    window_stride,
    end_ptr,  # int32 [B]
    drafted_ptr,  # int32 [B], of level 0
    room_ptr,  # int32 [B], requested of level 0
    requested_ptr,  # int32 [B], of the top level
    slot_ptr,  # int32 [B]
    own_ptr,  # float64 [2, S, slots + 1]
    count_ptr,  # int32 [S, slots + 1]
    token_ptr,  # int32 [S, slots + 1, N]
    expected_ptr,  # float64 [S, slots + 1, N]
    prior_ptr,  # float64 [1]
    least_ptr,  # float64 [1], probability to survive below which nothing is drafted
    chosen_ptr,  # int32 [slots + 1], the source that drafts, -1 for none
    drawn_ptr,  # float32 [slots + 1], with HAS_DRAFTER
    wanted_ptr,  # int64 [1], with HAS_DRAFTER: one more for each request that wants a whole draft
    temperature_ptr,  # float32 [B], of level 0
    slots,
    SOURCES: tl.constexpr,
    HAS_DRAFTER: tl.constexpr,  # the last source draws its tokens
    N: tl.constexpr,
    LANES: tl.constexpr,
):
    request = tl.program_id(0)
    slot = slot_of(slot_ptr, requested_ptr, request, slots)
    room = tl.load(room_ptr + request)
    lane = tl.arange(0, LANES)
    offers = own_ptr, count_ptr, token_ptr, expected_ptr, prior_ptr, least_ptr
    none = tl.full([2], -1, tl.int32)
    chosen, drafted, taken = best_offer(offers, slot, slots, room, none, SOURCES, N, LANES)
    end = tl.load(end_ptr + request)
    tl.store(window_ptr + request * window_stride + end + lane, taken, mask=lane < drafted)
    tl.store(end_ptr + request, end + drafted)
    tl.store(drafted_ptr + request, drafted)
    tl.store(chosen_ptr + slot, tl.where(drafted > 0, chosen, -1))
    if HAS_DRAFTER:
        drawn = chosen == SOURCES - 1
        tl.store(drawn_ptr + slot, drawn.to(tl.float32))
        best, _, _ = best_offer(offers, slot, slots, room, none, SOURCES, N, LANES, WHOLE=True)
        wants = (best == SOURCES - 1) & (slot < slots)
        tl.atomic_add(wanted_ptr, wants.to(tl.int64), mask=wants, sem="relaxed")
        # Tokens that were drawn and not verified agree with the text less often than their kind is
        # accepted; an argmax, and a coupled draw, as often.
        sampled = tl.load(temperature_ptr + request) > 0
        known = tl.where(drawn, drafted, 0)
        tl.store(count_ptr + (SOURCES - 1) * (slots + 1) + slot, known, mask=sampled)
