"""What the kernels share: how a logits row is cut, its log-normaliser, inverse-CDF draws.

A row of V logits is cut into chunks, one program each, and a chunk into blocks. A chunk leaves
its peak and the sum of exp(logit - peak) behind, from which the normaliser of the row comes; a
block its mass, from which the one block comes that a draw has to read again. Chunks are large so
that few numbers stand for a row, blocks small so that a draw reads little.
"""

import torch
import triton
import triton.language as tl

# Vocabulary entries per program (32 per thread: four 16-byte loads in flight in bf16) and per
# block of a draw.
CHUNK = 8192
BLOCK = 2048
NUM_WARPS = 8

LOGIT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def cut(vocab_size: int) -> tuple[int, int, int]:
    """(entries per chunk, entries per block, chunks per row), powers of two but for the last."""
    chunk = min(CHUNK, max(32, triton.next_power_of_2(vocab_size)))
    return chunk, min(BLOCK, chunk), triton.cdiv(vocab_size, chunk)


def pad(count: int) -> int:
    """The power of two, at least 2, that holds ``count`` lanes."""
    return max(2, triton.next_power_of_2(count))


def check_logits(name: str, logits: torch.Tensor, ndim: int) -> None:
    """Raise ValueError unless ``logits`` has ``ndim`` dimensions, a dtype of LOGIT_DTYPES and
    contiguous rows."""
    if logits.dtype not in LOGIT_DTYPES:
        raise ValueError(f"{name} must be bfloat16, float16 or float32, got {logits.dtype}.")
    if logits.ndim != ndim or logits.shape[-1] == 0:
        raise ValueError(f"{name} must have {ndim} dimensions, V > 0, got {list(logits.shape)}.")
    if logits.shape[-1] > 2**24:
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
    """Raise ValueError unless ``tensor`` is a contiguous [size] vector on ``device``."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name} must be {wanted}, got {tensor.dtype}.")
    if tensor.ndim != 1 or (size is not None and tensor.shape[0] != size):
        wanted = "one dimension" if size is None else f"shape [{size}]"
        raise ValueError(f"{name} must have {wanted}, got {list(tensor.shape)}.")
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
    """1 / T, and 1 where T = 0 (a greedy row, or a one-hot proposal, is not scaled)."""
    return tl.where(temperature > 0, 1.0 / tl.where(temperature > 0, temperature, 1.0), 1.0)


@triton.jit
def peak_and_sum(x):
    """max(x) and sum(exp(x - max)); the sum is NaN if x holds a NaN or +inf, 0 if all are -inf."""
    peak = tl.max(x, axis=0)
    return peak, tl.sum(exp_below(x, peak), axis=0)


@triton.jit
def exp_below(x, peak):
    """exp(x - peak), where peak = max(x) may be -inf."""
    return tl.exp(x - tl.where(peak > float("-inf"), peak, 0.0))


@triton.jit
def block_masses(weight, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Sums [CHUNK / BLOCK] of the blocks of a chunk."""
    return tl.sum(tl.reshape(weight, [CHUNK // BLOCK, BLOCK]), axis=1)


@triton.jit
def peak_and_index(x, entry):
    """max(x), NaN if x holds one, and the lowest index of it as a float32 (exact below 2**24)."""
    peak = tl.max(x, axis=0)
    index = tl.min(tl.where(x == peak, entry, 2147483647), axis=0)
    bad = tl.sum((x != x).to(tl.int32), axis=0) > 0
    return tl.where(bad, float("nan"), peak), tl.where(bad, 0, index).to(tl.float32)


@triton.jit
def greedy_token(peak, index):
    """Lowest argmax of a row from its chunks (peak, index as float32); -1 if it is not finite."""
    top = tl.max(peak, axis=0)
    bad = (tl.sum((peak != peak).to(tl.int32), axis=0) > 0) | (top == float("inf"))
    bad = bad | (top == float("-inf"))
    token = tl.min(tl.where(peak == top, index, 16777216.0), axis=0)
    return tl.where(bad, -1.0, token).to(tl.int64)


@triton.jit
def log_normaliser(peak, total):
    """log(sum(exp(x))) of rows from their chunks [rows, chunks] (absent: -inf, 0); not finite
    when a row is not a law (NaN, +inf, all masked)."""
    top = tl.max(peak, axis=1)
    shift = tl.where(top > float("-inf"), top, 0.0)
    return shift + tl.log(tl.sum(total * tl.exp(peak - shift[:, None]), axis=1))


@triton.jit
def is_finite(x):
    """False for NaN and the infinities."""
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def lane(values, index, i):
    """values[i] of a block whose lanes are numbered by ``index``; other lanes may hold NaN."""
    return tl.sum(tl.where(index == i, values, tl.zeros_like(values)), axis=0)


@triton.jit
def pick(mass, index, goal):
    """Inverse CDF: the first lane whose cumulative mass passes ``goal``, never one of no mass.

    mass: float64 block, ``goal``: float64 in [0, sum(mass)). Returns (lane, mass before it).
    """
    cumulative = tl.cumsum(mass, axis=0)
    past: tl.constexpr = 2147483647
    first = tl.min(tl.where((cumulative > goal) & (mass > 0), index, past), axis=0)
    # Rounding can leave the goal at the very end: then the last lane that has mass.
    last = tl.max(tl.where(mass > 0, index, 0), axis=0)
    chosen = tl.where(first == past, last, first)
    return chosen, tl.sum(tl.where(index < chosen, mass, 0.0), axis=0)
