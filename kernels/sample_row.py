"""One token drawn per row of logits, together with the row's logsumexp.

For drafting: the draw reads the whole row, so its logsumexp costs nothing here and saves the
verifier one read of every proposal row (``draft_lse``).
"""

import torch
import triton
import triton.language as tl

from vllm_hsd.kernels.blocks import (
    NUM_WARPS,
    argmax_of_chunks,
    block_masses,
    check_logits,
    check_vector,
    chunk_argmax,
    exp_shifted,
    inverse_cdf_index,
    is_finite,
    load_kept,
    logsumexp_of_chunks,
    padded_size,
    tile_shape,
)
from vllm_hsd.kernels.rng import stream_of, uniform


@triton.jit
def store_draw_stats(
    stats, row, first, vocab_size, COUPLED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Statistics of one chunk of a row for `drawn_token`.

    Written are the maximum, the sum of exp(x - maximum) or the argmax, and the block masses, at the
    pointers of `stats`: (maximum, stride from it to the second one, masses). `row` is (pointer, T,
    threshold, seed, position).
    """
    stats_ptr, stats_stride, mass_ptr = stats
    row_ptr, temperature, threshold, _, _ = row
    if temperature > 0:
        entry = first + tl.arange(0, CHUNK)
        x = load_kept(row_ptr, entry, vocab_size, 1.0 / temperature, threshold)
        maximum = tl.max(x, axis=0)
        masses = block_masses(exp_shifted(x, maximum), CHUNK, BLOCK)
        tl.store(mass_ptr + tl.arange(0, CHUNK // BLOCK), masses)
        second = tl.sum(masses, axis=0)
    else:
        maximum, second = chunk_argmax(row, first, vocab_size, COUPLED, CHUNK, BLOCK)
    tl.store(stats_ptr, maximum)
    tl.store(stats_ptr + stats_stride, second)


@triton.jit
def drawn_token(
    stats, row, key, vocab_size, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr
):
    """(token int64, logsumexp) of a row from its statistics, with the uniform of the draw.

    `stats` is as in `store_draw_stats`, at the row's first chunk, and their number; `row` is
    (pointer, T, threshold), `key` the (seed, stream, draw) of the uniform. An invalid row at T > 0
    gives token 0, as plain vLLM, and a logsumexp that is not finite.
    """
    stats_ptr, stats_stride, mass_ptr, chunks = stats
    row_ptr, temperature, threshold = row
    seed, stream, draw = key
    parts: tl.constexpr = CHUNK // BLOCK
    c = tl.arange(0, CHUNKS)
    maximum = tl.load(stats_ptr + c, mask=c < chunks, other=float("-inf"))
    second = tl.load(stats_ptr + stats_stride + c, mask=c < chunks, other=0.0)
    # That of an invalid row at T > 0: its softmax is NaN everywhere, and the argmax of NaN is 0.
    token = tl.zeros((), tl.int64)
    if temperature > 0:
        lse = tl.max(logsumexp_of_chunks(maximum[None, :], second[None, :]), axis=0)
        if is_finite(lse):
            b = tl.arange(0, CHUNKS * parts)
            inside = b < chunks * parts
            mass = tl.load(mass_ptr + b, mask=inside, other=0.0)
            scale = tl.load(stats_ptr + b // parts, mask=inside, other=float("-inf"))
            mass = (mass * tl.exp(scale - lse)).to(tl.float64)
            goal = uniform(seed, stream, draw) * tl.sum(mass, axis=0)
            chosen, before = inverse_cdf_index(mass, b, goal)
            entry = chosen * BLOCK + tl.arange(0, BLOCK)
            x = load_kept(row_ptr, entry, vocab_size, 1.0 / temperature, threshold)
            index, _ = inverse_cdf_index(tl.exp(x - lse).to(tl.float64), entry, goal - before)
            token = index.to(tl.int64)
    else:
        lse = 0.0
        token = tl.max(argmax_of_chunks(maximum[None, :], second[None, :]), axis=0)
    return token, lse


@triton.jit(do_not_specialize=["stats_stride"])
def sample_stats_kernel(
    stats_ptr,  # float32 [2, N, CHUNKS]: max; sum of exp(x - max), or argmax where T = 0
    stats_stride,  # N * CHUNKS
    mass_ptr,  # float32 [N, CHUNKS, CHUNK / BLOCK], relative to the maximum of the chunk
    logits_ptr,  # [N, V]
    logits_stride,
    temperature_ptr,  # float32 [N]
    threshold_ptr,  # float32 [N], with FILTERED
    seed_ptr,  # int64 [N], with COUPLED
    position_ptr,  # int64 [N], with COUPLED
    position_stride,
    chunks,
    vocab_size,
    FILTERED: tl.constexpr,
    COUPLED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0)
    row = (slot // chunks).to(tl.int64)
    threshold = float("-inf")
    if FILTERED:
        threshold = tl.load(threshold_ptr + row)
    seed, position = 0, 0
    if COUPLED:
        seed = tl.load(seed_ptr + row)
        position = tl.load(position_ptr + row * position_stride)
    temperature = tl.load(temperature_ptr + row)
    stats = stats_ptr + slot, stats_stride, mass_ptr + slot.to(tl.int64) * (CHUNK // BLOCK)
    own = logits_ptr + row * logits_stride, temperature, threshold, seed, position
    store_draw_stats(stats, own, (slot % chunks) * CHUNK, vocab_size, COUPLED, CHUNK, BLOCK)


@triton.jit(do_not_specialize=["stats_stride", "stream", "draw_offset"])
def draw_kernel(
    token_ptr,  # int64 [N]
    lse_ptr,  # float32 [N]
    stats_ptr,  # float32 [2, N, CHUNKS]
    stats_stride,  # N * CHUNKS
    mass_ptr,  # float32 [N, CHUNKS, CHUNK / BLOCK]
    logits_ptr,  # [N, V]
    logits_stride,
    temperature_ptr,  # float32 [N]
    threshold_ptr,  # float32 [N], with FILTERED
    seed_ptr,  # int64 [N]
    draw_ptr,  # int64 [N]
    stream,
    draw_offset,
    chunks,
    vocab_size,
    FILTERED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    threshold = float("-inf")
    if FILTERED:
        threshold = tl.load(threshold_ptr + row)
    mass_ptr += row * chunks * (CHUNK // BLOCK)
    stats = stats_ptr + row * chunks, stats_stride, mass_ptr, chunks
    own = logits_ptr + row * logits_stride, tl.load(temperature_ptr + row), threshold
    key = tl.load(seed_ptr + row), stream, tl.load(draw_ptr + row) + draw_offset
    token, lse = drawn_token(stats, own, key, vocab_size, CHUNK, BLOCK, CHUNKS)
    tl.store(token_ptr + row, token)
    tl.store(lse_ptr + row, lse)


def sample_row(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    draws: torch.Tensor,
    *,
    level: int = 0,
    draw_offset: int = 0,
    thresholds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token from softmax(logits / temperature) of every row, by inverse CDF.

    A row of a negative temperature is coupled with the target: its token is the argmax of
    logits / -temperature plus the noise that plain vLLM draws with at its position.

    An invalid row (a NaN or +inf in it, or only -inf) gives the token that vLLM emits for it:
    the argmax with NaN as the maximum at temperature 0, token 0 above it (see ``chain_verify``).
    Its logsumexp is not finite, which ends a draft before that token in verification.

    Args:
        logits: [N, V] bfloat16, float16 or float32, contiguous rows.
        temperature: float32 [N]; 0 takes the argmax (the lowest index of it), and a negative one
            that of the perturbed logits, which needs positions.
        seeds: int64 [N], request seeds.
        draws: int64 [N], the request's counter for this level's drafts; must only increase.
        level: drafting level, the stream of the uniforms.
        draw_offset: added to every entry of draws.
        thresholds: float32 [N] of ``row_thresholds``; tokens below it have no probability.
        positions: int64 [N], any stride: position of the token that each row follows.

    Returns:
        (token ids int64 [N], log(sum(exp(logits / temperature))) float32 [N] of the kept logits,
        which is 0 where the temperature is not above 0). The uniform of row i is
        ``host_uniforms(seeds[i], level, draws[i] + draw_offset)``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    check_logits("logits", logits, 2)
    rows, vocab_size = logits.shape
    check_vector("temperature", temperature, rows, (torch.float32,), logits.device)
    check_vector("seeds", seeds, rows, (torch.int64,), logits.device)
    check_vector("draws", draws, rows, (torch.int64,), logits.device)
    if thresholds is not None:
        check_vector("thresholds", thresholds, rows, (torch.float32,), logits.device)
    if positions is not None and (positions.shape != (rows,) or positions.dtype != torch.int64):
        raise ValueError(f"positions must be int64 with shape [{rows}].")
    stream = stream_of(level)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    lse = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return token, lse
    chunk, block, chunks = tile_shape(vocab_size)
    stats = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    mass = torch.empty(rows, chunks, chunk // block, dtype=torch.float32, device=logits.device)
    sample_stats_kernel[(rows * chunks,)](
        stats,
        rows * chunks,
        mass,
        logits,
        logits.stride(0),
        temperature,
        temperature if thresholds is None else thresholds,
        seeds,
        seeds if positions is None else positions,
        0 if positions is None else positions.stride(0),
        chunks,
        vocab_size,
        FILTERED=thresholds is not None,
        COUPLED=positions is not None,
        CHUNK=chunk,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )
    draw_kernel[(rows,)](
        token,
        lse,
        stats,
        rows * chunks,
        mass,
        logits,
        logits.stride(0),
        temperature,
        temperature if thresholds is None else thresholds,
        seeds,
        draws,
        stream,
        draw_offset,
        chunks,
        vocab_size,
        FILTERED=thresholds is not None,
        CHUNK=chunk,
        BLOCK=block,
        CHUNKS=padded_size(chunks),
        num_warps=NUM_WARPS,
    )
    return token, lse
