"""Device helpers shared by the kernels: tiling of logits rows, logsumexp, inverse-CDF draws.

A row of V logits is split into chunks, one program each, and a chunk into blocks. For each chunk
its maximum and the sum of exp(logit - maximum) are stored; together they give the logsumexp of
the row. For each block its mass is stored; the masses say which single block a draw has to read
again. Chunks are large so that few numbers describe a row, blocks are small so that a draw reads
little.
"""

import torch
import triton
import triton.language as tl

from vllm_hsd.kernels.rng import gumbel

# Vocabulary entries per program (32 per thread: four 16-byte loads in flight in bfloat16) and per
# block of a draw.
CHUNK = 8192
BLOCK = 2048
NUM_WARPS = 8

LOGIT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Exact integers of float32 end here; argmax indices are kept as float32.
MAX_VOCAB_SIZE = 2**24


def tile_shape(vocab_size: int) -> tuple[int, int, int]:
    """(entries per chunk, entries per block, chunks per row); the first two are powers of two."""
    chunk = min(CHUNK, max(32, padded_size(vocab_size)))
    return chunk, min(BLOCK, chunk), triton.cdiv(vocab_size, chunk)


def padded_size(count: int) -> int:
    """Smallest power of two, at least 2, that holds ``count`` lanes."""
    return max(2, 1 << (count - 1).bit_length())


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a part of a tensor that begins between 16 bytes: kernels would be compiled for it."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def check_logits(name: str, logits: torch.Tensor, ndim: int) -> None:
    """Check dimensions, dtype and strides of a tensor of logits.

    Raises:
        ValueError: not ``ndim`` dimensions, a dtype not in LOGIT_DTYPES, or rows that are not
            contiguous; the message names the argument.
    """
    if logits.dtype not in LOGIT_DTYPES:
        raise ValueError(f"{name} must be bfloat16, float16 or float32, got {logits.dtype}.")
    if logits.ndim != ndim or logits.shape[-1] == 0:
        raise ValueError(f"{name} must have {ndim} dimensions, V > 0, got {list(logits.shape)}.")
    if logits.shape[-1] > MAX_VOCAB_SIZE:
        raise ValueError(f"{name} has {logits.shape[-1]} columns, at most 2**24 are supported.")
    if logits.stride(-1) != 1:
        raise ValueError(f"{name} must have contiguous rows (stride 1 along the vocabulary).")


def check_vector(
    name: str,
    tensor: torch.Tensor,
    size: int | None,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check that ``tensor`` is a contiguous [size] vector on ``device``; any size if None.

    Raises:
        ValueError: it is not; the message names the argument.
    """
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name} must be {expected}, got {tensor.dtype}.")
    if tensor.ndim != 1 or (size is not None and tensor.shape[0] != size):
        expected = "one dimension" if size is None else f"shape [{size}]"
        raise ValueError(f"{name} must have {expected}, got {list(tensor.shape)}.")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the target logits on {device}: move one.")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous.")


@triton.jit
def load_scaled(row_ptr, entry, vocab_size, inv_temperature):
    """Logits / temperature of some entries, float32; -inf past the vocabulary."""
    logit = tl.load(row_ptr + entry, mask=entry < vocab_size, other=float("-inf"))
    return logit.to(tl.float32) * inv_temperature


@triton.jit
def inverse_temperature(temperature):
    """1 / |T|, and 1 where T = 0 (a greedy target or a one-hot proposal is not scaled)."""
    scale = tl.abs(temperature)
    return tl.where(scale > 0, 1.0 / tl.where(scale > 0, scale, 1.0), 1.0)


@triton.jit
def load_kept(row_ptr, entry, vocab_size, inv_temperature, threshold):
    """As load_scaled, with -inf below the threshold of the row; NaN stays."""
    x = load_scaled(row_ptr, entry, vocab_size, inv_temperature)
    return tl.where(x < threshold, float("-inf"), x)


@triton.jit
def without_filtered(logit, temperature, threshold):
    """Logits as they are stored for verification: -inf below the threshold, which is of x / T."""
    below = logit.to(tl.float32) * (1.0 / temperature) < threshold
    return tl.where(below, float("-inf"), logit)


@triton.jit
def exp_shifted(x, maximum):
    """exp(x - maximum), where maximum = max(x) may be -inf."""
    return tl.exp(x - tl.where(maximum > float("-inf"), maximum, 0.0))


@triton.jit
def max_and_index(x, entry):
    """max(x) and its lowest index as a float32, with NaN as the maximum (as torch.argmax)."""
    none: tl.constexpr = 2147483647
    nan_offset: tl.constexpr = 1 << 30
    maximum = tl.max(x, axis=0)
    # One reduction finds both: the indices of NaN are shifted below zero, so the first one wins.
    candidate = tl.where(x != x, entry - nan_offset, tl.where(x == maximum, entry, none))
    index = tl.min(candidate, axis=0)
    has_nan = index < 0
    index = tl.where(has_nan, index + nan_offset, index)
    return tl.where(has_nan, float("nan"), maximum), index.to(tl.float32)


@triton.jit
def perturbed_argmax(row, first, vocab_size, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """max_and_index of logits / |T| plus vLLM's noise for a position, over a chunk of a row.

    `row` is (pointer, T, threshold, seed, position), of which what is below the threshold is left
    out. `first` is the chunk's first entry.
    """
    row_ptr, temperature, threshold, seed, position = row
    inv_temperature = inverse_temperature(temperature)
    scale = tl.abs(temperature)
    best = tl.full((), float("-inf"), tl.float32)
    best_index = first.to(tl.float32)
    # A whole chunk with its noise would take too many registers.
    for offset in tl.range(0, CHUNK, BLOCK):
        entry = first + offset + tl.arange(0, BLOCK)
        logit = load_scaled(row_ptr, entry, vocab_size, 1.0)
        # vLLM divides; a product could round otherwise.
        x = logit / scale + gumbel(seed, position, entry)
        x = tl.where(logit * inv_temperature < threshold, float("-inf"), x)
        maximum, index = max_and_index(x, entry)
        better = (maximum > best) | ((maximum != maximum) & (best == best))
        best = tl.where(better, maximum, best)
        best_index = tl.where(better, index, best_index)
    return best, best_index


@triton.jit
def chunk_argmax(
    row, first, vocab_size, COUPLED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """max_and_index of a chunk of a greedy row, or with COUPLED of one that may be coupled.

    Of `row`, which is that of perturbed_argmax.
    """
    entry = first + tl.arange(0, CHUNK)
    if COUPLED:
        if row[1] < 0:
            maximum, index = perturbed_argmax(row, first, vocab_size, CHUNK, BLOCK)
        else:
            maximum, index = max_and_index(load_scaled(row[0], entry, vocab_size, 1.0), entry)
    else:
        maximum, index = max_and_index(load_scaled(row[0], entry, vocab_size, 1.0), entry)
    return maximum, index


@triton.jit
def store_max_and_sum(stats_ptr, stats_stride, x):
    """Store the maximum of a chunk of scaled logits, and `stats_stride` after it sum(exp(x - max)).

    The sum is NaN if x holds a NaN or +inf, 0 if all are -inf.
    """
    maximum = tl.max(x, axis=0)
    tl.store(stats_ptr, maximum)
    tl.store(stats_ptr + stats_stride, tl.sum(exp_shifted(x, maximum), axis=0))


@triton.jit
def argmax_of_chunks(maximum, index):
    """Argmax int64 [rows] from (maximum, index as float32) [rows, chunks] (absent ones: -inf, 0).

    NaN counts as the maximum and the lowest index wins, as in torch.argmax; token 0 for a row of
    -inf alone.
    """
    row_max = tl.max(maximum, axis=1)
    is_nan = maximum != maximum
    has_nan = tl.sum(is_nan.to(tl.int32), axis=1) > 0
    is_top = tl.where(has_nan[:, None], is_nan, maximum == row_max[:, None])
    return tl.min(tl.where(is_top, index, 16777216.0), axis=1).to(tl.int64)


@triton.jit
def logsumexp_of_chunks(maximum, total):
    """log(sum(exp(x))) of rows from their chunks [rows, chunks] (absent ones: -inf, 0).

    Not finite where a row is invalid: it holds a NaN or +inf, or only -inf.
    """
    row_max = tl.max(maximum, axis=1)
    shift = tl.where(row_max > float("-inf"), row_max, 0.0)
    return shift + tl.log(tl.sum(total * tl.exp(maximum - shift[:, None]), axis=1))


@triton.jit
def block_masses(weight, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Sums [CHUNK / BLOCK] of the blocks of a chunk."""
    return tl.sum(tl.reshape(weight, [CHUNK // BLOCK, BLOCK]), axis=1)


@triton.jit
def is_finite(x):
    """False for NaN and the infinities."""
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def times(a, b):
    """Of scans that multiply."""
    return a * b


@triton.jit
def extract_lane(values, index, i):
    """values[i] of a tensor whose lanes are numbered by ``index``; other lanes may hold NaN."""
    return tl.sum(tl.where(index == i, values, tl.zeros_like(values)), axis=0)


@triton.jit
def inverse_cdf_index(mass, index, goal):
    """First lane whose cumulative mass exceeds ``goal``, or the heaviest; never one of zero mass.

    mass: float64 [lanes]; goal: float64 in [0, sum(mass)). Returns (lane, mass before it).
    """
    cumulative = tl.cumsum(mass, axis=0)
    none: tl.constexpr = 2147483647
    first = tl.min(tl.where((cumulative > goal) & (mass > 0), index, none), axis=0)
    # Rounding can put the goal at the very end: then the heaviest lane, which it matters least to.
    heaviest = tl.min(tl.where((mass == tl.max(mass, axis=0)) & (mass > 0), index, none), axis=0)
    chosen = tl.where(first == none, tl.where(heaviest == none, 0, heaviest), first)
    return chosen, tl.sum(tl.where(index < chosen, mass, 0.0), axis=0)
