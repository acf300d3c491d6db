"""One threshold per row of logits for a request's min-p, top-k and top-p.

Whatever is below its row's threshold has no probability. The kernels that read the row later leave
it out, so no filtered copy is made. The order is vLLM's: min-p, then top-k of what is left, then
top-p of that. Equal logits share their fate: those at the threshold are all kept.

Launch 1 reads every row once: its logsumexp and the maxima of its parts bound the threshold from
below. Launch 2 reads it again, gathers the few entries above the bound, and the last program of a
row to arrive finds the threshold among them. Rows without a filter are not read.

Of a flat row tens of thousands of entries may be above the bound of its top-p. A sample of the row
tells about where the threshold is: what is far above it is only weighed, and what is near it is
gathered. The weights say whether the threshold is there; if it is not, the row itself is searched.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_hsd.kernels.blocks import (
    NUM_WARPS,
    check_logits,
    check_vector,
    is_finite,
    load_scaled,
    logsumexp_of_chunks,
    padded_size,
    store_max_and_sum,
    tile_shape,
)

# Maxima kept of each chunk, and entries of a row that are gathered; with more above the bound the
# row itself is searched.
PARTS = 32
CANDIDATES = 16384
# One entry in so many is in the sample, in which the threshold's place is found by so many halvings
# of the row's range. A bracket of 3/8 of what can be gathered on each side of it is off by five
# standard deviations of the sample in one row of millions.
SAMPLED = 128
_HALVINGS = tl.constexpr(12)
# Weights are added as integers, in units of 2**-38 of the largest, so that the order in which
# programs arrive changes no sum: all ranks must find the same threshold.
_ONE = tl.constexpr(1 << 38)
_INTEGERS = (torch.int64, torch.int32)


class Filters(NamedTuple):
    """Filters of R requests; a greedy request ignores them.

    Attributes:
        top_k: int32 [R]; none if below 1 or at least V.
        top_p: float32 [R]; none if at least 1.
        min_p: float32 [R]; none if 0.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


@triton.jit
def _key(x):
    """Integer in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    """Inverse of _key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _request(row, requests, vocab_size, HAS_INDEX: tl.constexpr):
    """(1 / temperature, top-k or V, top-p or 1, min-p) of a row; no filter if it has none."""
    index_ptr, rows_per_request, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr = requests
    if HAS_INDEX:
        request = tl.load(index_ptr + row).to(tl.int64)
    else:
        request = (row // rows_per_request).to(tl.int64)
    real = request >= 0
    temperature = tl.abs(tl.load(temperature_ptr + request, mask=real, other=0.0))
    sampled = real & (temperature > 0)
    top_k = tl.load(top_k_ptr + request, mask=sampled, other=0)
    top_k = tl.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    top_p = tl.load(top_p_ptr + request, mask=sampled, other=1.0)
    min_p = tl.load(min_p_ptr + request, mask=sampled, other=0.0)
    return 1.0 / tl.where(sampled, temperature, 1.0), top_k, top_p, min_p


@triton.jit(do_not_specialize=["stats_stride", "rows_per_request"])
def row_bounds_kernel(
    stats_ptr,  # float32 [2, N, CHUNKS]: max; sum of exp(x - max)
    stats_stride,  # N * CHUNKS
    maxima_ptr,  # float32 [N, CHUNKS, PARTS]
    sample_ptr,  # float32 [N, CHUNKS, SAMPLES]
    gathered_ptr,  # int32 [N, 2]: candidates, programs that have arrived
    over_ptr,  # int64 [N], weight of what is above the bracket
    logits_ptr,  # [N, V]
    logits_stride,
    index_ptr,  # [N] -> R, with HAS_INDEX
    rows_per_request,
    temperature_ptr,  # float32 [R]
    top_k_ptr,  # int32 [R]
    top_p_ptr,  # float32 [R]
    min_p_ptr,  # float32 [R]
    chunks,
    vocab_size,
    HAS_INDEX: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    SAMPLES: tl.constexpr,  # of a chunk
):
    slot = tl.program_id(0).to(tl.int64)
    row = slot // chunks
    chunk = (slot % chunks).to(tl.int32)
    requests = index_ptr, rows_per_request, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr
    inv_temperature, top_k, top_p, min_p = _request(row, requests, vocab_size, HAS_INDEX)
    if chunk == 0:
        tl.store(gathered_ptr + row * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))
        tl.store(over_ptr + row, tl.zeros((), tl.int64))
    if (top_k < vocab_size) | (top_p < 1) | (min_p > 0):
        entry = chunk * CHUNK + tl.arange(0, CHUNK)
        x = load_scaled(logits_ptr + row * logits_stride, entry, vocab_size, inv_temperature)
        store_max_and_sum(stats_ptr + slot, stats_stride, x)
        maxima = tl.max(tl.reshape(x, [PARTS, CHUNK // PARTS]), axis=1)
        tl.store(maxima_ptr + slot * PARTS + tl.arange(0, PARTS), maxima)
        place = tl.arange(0, CHUNK)
        every: tl.constexpr = CHUNK // SAMPLES
        at = sample_ptr + slot * SAMPLES + place // every
        tl.store(at, x, mask=(place % every == 0) & (top_p < 1))


@triton.jit
def _above(sample, weight, goal, low, high):
    """(t, t + (high - low) / 2**_HALVINGS) around where the weight of what is above meets a goal.

    That of samples >= t is at least the goal, unless t is `low`; of those from the second on it is
    less, unless that is `high`.
    """
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        enough = tl.sum(tl.where(sample >= middle, weight, 0.0), axis=0) >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low, high


@triton.jit
def _bracket(sample, lse, maximum, top_p, bound, EVERY: tl.constexpr, SPREAD: tl.constexpr):
    """(lowest, above the highest) entry that is near the threshold of a top-p, by a sample.

    The second is infinite where so few entries are above the bound that all can be gathered.
    """
    one = tl.where(sample >= bound, 1.0, 0.0)
    low, high = bound, tl.full((), float("inf"), tl.float32)
    if tl.sum(one, axis=0) > SPREAD:
        # By the weight below it: the row's few largest entries are not in the sample.
        weight = tl.exp(sample - lse)
        goal = tl.sum(weight, axis=0) - (1.0 - top_p) / EVERY
        top = maximum + 1.0
        near, _ = _above(sample, weight, goal, bound, top)
        rank = tl.sum(tl.where(sample >= near, 1.0, 0.0), axis=0)
        low, _ = _above(sample, one, rank + SPREAD, bound, top)
        _, high = _above(sample, one, rank - SPREAD + 1.0, bound, top)
    return low, high


@triton.jit
def _weight_above(
    threshold, searched, whole, BY_MASS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """Number of entries at least as large as the threshold, or with BY_MASS their weight, int64.

    `searched`: candidates, how many, the row that is searched itself if `whole`, how many entries
    it has, its maximum and 1 / temperature. A tile costs a load; threads add up at the end.
    """
    source_ptr, count, row_ptr, vocab_size, maximum, inv_temperature = searched
    if whole:
        weights = tl.zeros([BLOCK], tl.int64)
        for begin in range(0, vocab_size, BLOCK):
            entry = begin + tl.arange(0, BLOCK)
            x = load_scaled(row_ptr, entry, vocab_size, inv_temperature)
            inside = (x >= threshold) & (entry < vocab_size)
            weights += tl.where(inside, _weight(x, maximum, BY_MASS), 0)
        total = tl.sum(weights, axis=0)
    else:
        of_tile = tl.zeros([TILE], tl.int64)
        for begin in range(0, count, TILE):
            place = begin + tl.arange(0, TILE)
            # There is room for whole tiles.
            candidate = tl.load(source_ptr + place)
            kept = (candidate >= threshold) & (place < count)
            of_tile += tl.where(kept, _weight(candidate, maximum, BY_MASS), 0)
        total = tl.sum(of_tile, axis=0)
    return total


@triton.jit
def _weight(x, maximum, BY_MASS: tl.constexpr):
    """Of entries, int64."""
    # A power of two scales exactly.
    return (tl.exp(x - maximum) * _ONE).to(tl.int64) if BY_MASS else tl.full(x.shape, 1, tl.int64)


@triton.jit
def _largest_threshold(
    goal,
    keys,
    searched,
    whole,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Key of the largest threshold whose entries weigh `goal` or more, from the first of `keys`.

    It is below the second.
    """
    low, high = keys
    while high - low > 1:
        middle = (low + high) >> 1
        weight = _weight_above(_value(middle), searched, whole, BY_MASS, TILE, BLOCK)
        low = tl.where(weight >= goal, middle, low)
        high = tl.where(weight >= goal, high, middle)
    return low


@triton.jit(do_not_specialize=["stats_stride", "rows_per_request"])
def threshold_kernel(
    threshold_ptr,  # float32 [N]
    candidate_ptr,  # float32 [N, CANDIDATES]
    stats_ptr,  # float32 [2, N, CHUNKS]
    stats_stride,  # N * CHUNKS
    maxima_ptr,  # float32 [N, CHUNKS, PARTS]
    sample_ptr,  # float32 [N, CHUNKS, SAMPLES]
    gathered_ptr,  # int32 [N, 2]
    over_ptr,  # int64 [N]
    logits_ptr,  # [N, V]
    logits_stride,
    index_ptr,  # [N] -> R, with HAS_INDEX
    rows_per_request,
    temperature_ptr,  # float32 [R]
    top_k_ptr,  # int32 [R]
    top_p_ptr,  # float32 [R]
    min_p_ptr,  # float32 [R]
    chunks,
    vocab_size,
    HAS_INDEX: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,  # candidates that are read at a time
    PARTS: tl.constexpr,
    SAMPLES: tl.constexpr,
    LANES: tl.constexpr,  # of all samples of a row
    SPREAD: tl.constexpr,  # samples on each side of the threshold that are near it
    CHUNKS: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    row = slot // chunks
    chunk = (slot % chunks).to(tl.int32)
    requests = index_ptr, rows_per_request, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr
    inv_temperature, top_k, top_p, min_p = _request(row, requests, vocab_size, HAS_INDEX)
    has_k, has_p = top_k < vocab_size, top_p < 1
    c = tl.arange(0, CHUNKS)
    inside = (c < chunks) & (has_k | has_p | (min_p > 0))
    maxima = tl.load(stats_ptr + row * chunks + c, mask=inside, other=float("-inf"))
    sums = tl.load(stats_ptr + row * chunks + c + stats_stride, mask=inside, other=0.0)
    maximum = tl.max(maxima, axis=0)
    lse = tl.max(logsumexp_of_chunks(maxima[None, :], sums[None, :]), axis=0)
    # An invalid row stays what it is.
    valid = is_finite(lse)
    floor = tl.where(valid & (min_p > 0), maximum + tl.log(min_p), float("-inf"))
    if valid & (has_k | has_p):
        bound, certain = floor, floor
        high = tl.full((), float("inf"), tl.float32)
        low = _key(tl.full((), float("-inf"), tl.float32))
        if has_k & (top_k <= chunks * PARTS):
            # The k-th largest of the parts' maxima is not above the k-th largest entry.
            part = tl.arange(0, CHUNKS * PARTS)
            largest = tl.load(
                maxima_ptr + row * chunks * PARTS + part,
                mask=part < chunks * PARTS,
                other=float("-inf"),
            )
            above_all = _key(maximum) + 1
            while above_all - low > 1:
                middle = (low + above_all) >> 1
                enough = tl.sum((largest >= _value(middle)).to(tl.int32), axis=0) >= top_k
                low = tl.where(enough, middle, low)
                above_all = tl.where(enough, above_all, middle)
            bound = tl.maximum(bound, _value(low))
        if has_p & (has_k == 0) & (min_p <= 0):
            # Entries below it have less than 1 - p together, however many they are.
            bound = lse + tl.log((1.0 - top_p) / vocab_size) - 0.001
            certain = bound
            lane = tl.arange(0, LANES)
            sample_at = sample_ptr + row * chunks * SAMPLES + lane
            sample = tl.load(sample_at, mask=lane < chunks * SAMPLES, other=float("-inf"))
            bound, high = _bracket(sample, lse, maximum, top_p, bound, CHUNK // SAMPLES, SPREAD)
        row_ptr = logits_ptr + row * logits_stride
        source_ptr = candidate_ptr + row * CANDIDATES
        over = tl.zeros([BLOCK // 2], tl.int64)
        # The addresses to store at move between threads: those of a whole block would spill.
        some: tl.constexpr = PARTS * BLOCK // (2 * CHUNK)
        part_at = maxima_ptr + slot * PARTS + tl.arange(0, some)
        for offset in tl.range(0, CHUNK, BLOCK // 2):
            # Few parts of a row have an entry above the bound.
            if tl.max(tl.load(part_at + offset * PARTS // CHUNK), axis=0) >= bound:
                entry = chunk * CHUNK + offset + tl.arange(0, BLOCK // 2)
                x = load_scaled(row_ptr, entry, vocab_size, inv_temperature)
                above = ((x >= bound) & (x < high) & (x > float("-inf"))).to(tl.int32)
                over += tl.where(x >= high, _weight(x, maximum, True), 0)
                number = tl.sum(above, axis=0)
                at = tl.atomic_add(gathered_ptr + row * 2, number, sem="relaxed")
                place = at + tl.cumsum(above, axis=0) - 1
                tl.store(source_ptr + place, x, mask=(above > 0) & (place < CANDIDATES))
        if high < float("inf"):
            tl.atomic_add(over_ptr + row, tl.sum(over, axis=0), sem="relaxed")
        # The last program of the row to arrive sees the candidates of all.
        tl.debug_barrier()
        earlier = tl.atomic_add(gathered_ptr + row * 2 + 1, 1, sem="acq_rel")
        if earlier == chunks - 1:
            count = tl.load(gathered_ptr + row * 2)
            whole = count > CANDIDATES
            searched = source_ptr, count, row_ptr, vocab_size, maximum, inv_temperature
            low = _key(bound)
            if has_k:
                goal = tl.minimum(top_k, tl.where(whole, vocab_size, count)).to(tl.int64)
                keys = low, _key(maximum) + 1
                low = _largest_threshold(goal, keys, searched, whole, False, TILE, BLOCK)
            if has_p:
                # The logsumexp of large logits is rounded.
                total = tl.sum(sums * tl.exp(maxima - maximum), axis=0).to(tl.float64) * _ONE
                if has_k | (min_p > 0):
                    total = _weight_above(_value(low), searched, whole, True, TILE, BLOCK)
                    total = total.to(tl.float64)
                # At least the largest entry.
                goal = tl.maximum((total * top_p).to(tl.int64), 1)
                if (high < float("inf")) & (whole == 0):
                    heavier = tl.load(over_ptr + row)
                    near = _weight_above(_value(low), searched, whole, True, TILE, BLOCK)
                    # The threshold is not near where the sample has it.
                    whole = (heavier >= goal) | (heavier + near < goal)
                    goal = tl.where(whole, goal, goal - heavier)
                if whole & (high < float("inf")):
                    low = _key(certain)
                keys = low, _key(tl.where(whole, maximum, tl.minimum(maximum, high))) + 1
                low = _largest_threshold(goal, keys, searched, whole, True, TILE, BLOCK)
            tl.store(threshold_ptr + row, _value(low))
    elif chunk == 0:
        tl.store(threshold_ptr + row, floor)


def row_thresholds(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    filters: Filters,
    *,
    index: torch.Tensor | None = None,
    rows_per_request: int = 1,
) -> torch.Tensor:
    """Smallest logit / |temperature| that each row's request keeps.

    Args:
        logits: [N, V] bfloat16, float16 or float32, contiguous rows.
        temperature: float32 [R]; 0 is greedy, and then nothing is filtered.
        filters: of the R requests.
        index: int64 or int32 [N], request of each row, negative for none.
        rows_per_request: without an index, rows of request 0, then of request 1, ...

    Returns:
        float32 [N], -inf where nothing is filtered, and for an invalid row (a NaN or +inf in it, or
        only -inf).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; names the argument.
    """
    check_logits("logits", logits, 2)
    rows, vocab_size = logits.shape
    device, requests = logits.device, temperature.shape[0]
    check_vector("temperature", temperature, None, (torch.float32,), device)
    check_vector("top_k", filters.top_k, requests, (torch.int32,), device)
    check_vector("top_p", filters.top_p, requests, (torch.float32,), device)
    check_vector("min_p", filters.min_p, requests, (torch.float32,), device)
    if index is not None:
        check_vector("index", index, rows, _INTEGERS, device)
    elif rows > requests * rows_per_request:
        raise ValueError(
            f"logits has {rows} rows, more than {rows_per_request} for each of {requests} requests."
        )
    threshold = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return threshold
    chunk, block, chunks = tile_shape(vocab_size)
    stats = torch.empty(2, rows, chunks, dtype=torch.float32, device=device)
    maxima = torch.empty(rows, chunks, PARTS, dtype=torch.float32, device=device)
    gathered = torch.empty(rows, 2, dtype=torch.int32, device=device)
    over = torch.empty(rows, dtype=torch.int64, device=device)
    candidates = min(CANDIDATES, chunks * chunk)
    samples = max(1, chunk // SAMPLED)
    # As many candidates on each side of a threshold; all of a small row are gathered.
    spread = max(1, 3 * samples * candidates // (8 * chunk))
    if vocab_size <= candidates:
        spread = vocab_size
    sample = torch.empty(rows, chunks, samples, dtype=torch.float32, device=device)
    candidate = torch.empty(rows, candidates, dtype=torch.float32, device=device)
    shared = (
        stats,
        rows * chunks,
        maxima,
        sample,
        gathered,
        over,
        logits,
        logits.stride(0),
        temperature if index is None else index,
        rows_per_request,
        temperature,
        *filters,
        chunks,
        vocab_size,
        index is not None,
    )
    sizes = {"CHUNK": chunk, "PARTS": PARTS, "SAMPLES": samples, "num_warps": NUM_WARPS}
    row_bounds_kernel[(rows * chunks,)](*shared, **sizes)
    threshold_kernel[(rows * chunks,)](
        threshold,
        candidate,
        *shared,
        CANDIDATES=candidates,
        BLOCK=block,
        TILE=min(2 * block, candidates),
        LANES=padded_size(chunks * samples),
        SPREAD=spread,
        CHUNKS=padded_size(chunks),
        **sizes,
    )
    return threshold
