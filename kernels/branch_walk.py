"""The walk along branches after the verification of a chain, in 2 launches.

The rule is that of ``vllm_hsd.rules.branches.follow``: the token that the verification of a
request's chain has emitted last is looked up among its branches, rows of point masses that the
target has computed too; where one has it at that place, the next token is drawn from that row, and
so on. Launch 1 reads the rows of branches that begin with all that was emitted, from there on, and
no other one. Launch 2 walks with one program a request.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_hsd.kernels.blocks import (
    NUM_WARPS,
    check_logits,
    check_vector,
    extract_lane,
    is_finite,
    padded_size,
    tile_shape,
)
from vllm_hsd.kernels.chain_verify import ChainResult
from vllm_hsd.kernels.rng import stream_of
from vllm_hsd.kernels.sample_row import drawn_token, store_draw_stats
from vllm_hsd.rules import MAX_KERNEL_DRAFT

_INTEGERS = (torch.int64, torch.int32)
# A verification's last draw at most; a walk takes those after it, as its first place is 1.
FIRST_DRAW = MAX_KERNEL_DRAFT + 1


class WalkResult(NamedTuple):
    """What B requests emit.

    Attributes:
        token_ids: int64 [B, places], the emitted tokens, then -1.
        num_emitted: int32 [B], how many.
        winner: int32 [B], the row that holds all of them but the last one, 0 for the chain.
    """

    token_ids: torch.Tensor
    num_emitted: torch.Tensor
    winner: torch.Tensor


@triton.jit
def _open_branches(
    emitted,
    count,
    rows,
    branch,
    is_branch,
    PLACES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Branches that begin with the `count` emitted tokens.

    `rows` are pointers at the request's tokens, offsets and counts.
    Returns (offsets of their roots [N], tokens [N], their ids [N, LANES], int32 [N] 1 where open).
    """
    token_ptr, offset_ptr, count_ptr = rows
    lane = tl.arange(0, LANES)
    offset = tl.load(offset_ptr + branch, mask=is_branch, other=0).to(tl.int64)
    tokens = tl.load(count_ptr + branch, mask=is_branch, other=0).to(tl.int32) - 1
    inside = (lane[None, :] < tokens[:, None]) & (lane < PLACES - 1)[None, :]
    at = token_ptr + offset[:, None] + 1 + lane[None, :]
    ids = tl.load(at, mask=inside, other=-1).to(tl.int64)
    differs = (ids != emitted[None, :]) & (lane < count)[None, :]
    differing = tl.sum(differs.to(tl.int32), axis=1)
    is_open = (differing == 0) & (count > 0) & (tokens >= count)
    return offset, tokens, ids, is_open.to(tl.int32)


@triton.jit(do_not_specialize=["stats_stride"])
def branch_stats_kernel(
    stats_ptr,  # float32 [2, B, R - 1, PLACES, CHUNKS]: as in sample_stats_kernel
    stats_stride,  # B * (R - 1) * PLACES * CHUNKS
    mass_ptr,  # float32 [B, R - 1, PLACES, CHUNKS, CHUNK / BLOCK]
    chain_ptr,  # int64 [B, WIDTH], tokens that the chains' verification emitted
    emitted_ptr,  # int32 [B]
    target_ptr,  # [num_logits, V]
    target_stride,
    token_ptr,  # [num_logits]
    cu_ptr,  # [B + 1]
    index_ptr,  # [B] -> max_num_reqs
    offset_ptr,  # int32 [B, R]
    count_ptr,  # int32 [B, R]
    temperature_ptr,  # float32 [max_num_reqs]
    threshold_ptr,  # float32 [num_logits], with FILTERED
    seed_ptr,  # int64 [max_num_reqs], with COUPLED
    position_ptr,  # int64 [num_logits], with COUPLED
    vocab_size,
    ROWS: tl.constexpr,  # R
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    FILTERED: tl.constexpr,
    COUPLED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    request = tl.program_id(2).to(tl.int64)
    place = tl.program_id(1) % PLACES
    branch = tl.program_id(1) // PLACES + 1
    lane = tl.arange(0, LANES)
    emitted = tl.load(chain_ptr + request * WIDTH + lane, mask=lane < WIDTH, other=-1)
    count = tl.load(emitted_ptr + request)
    begin = tl.load(cu_ptr + request).to(tl.int64)
    one = branch + tl.arange(0, 1)
    rows = token_ptr + begin, offset_ptr + request * ROWS, count_ptr + request * ROWS
    offset, tokens, _, is_open = _open_branches(
        emitted, count, rows, one, one < ROWS, PLACES, LANES
    )
    if (tl.max(is_open, axis=0) > 0) & (place >= count) & (place <= tl.max(tokens, axis=0)):
        state = tl.load(index_ptr + request).to(tl.int64)
        row = begin + tl.max(offset, axis=0) + place
        temperature = tl.load(temperature_ptr + state)
        threshold = float("-inf")
        if FILTERED:
            threshold = tl.load(threshold_ptr + row)
        seed, position = 0, 0
        if COUPLED:
            seed = tl.load(seed_ptr + state)
            position = tl.load(position_ptr + row)
        slot = (request * (ROWS - 1) + branch - 1) * PLACES + place
        slot = slot * tl.num_programs(0) + chunk
        stats = stats_ptr + slot, stats_stride, mass_ptr + slot * (CHUNK // BLOCK)
        own = target_ptr + row * target_stride, temperature, threshold, seed, position
        store_draw_stats(stats, own, chunk * CHUNK, vocab_size, COUPLED, CHUNK, BLOCK)


@triton.jit(do_not_specialize=["stats_stride", "stream", "first_draw"])
def walk_kernel(
    out_ptr,  # int64 [B, PLACES]
    count_out_ptr,  # int32 [B]
    winner_ptr,  # int32 [B]
    stats_ptr,  # float32 [2, B, R - 1, PLACES, CHUNKS]
    stats_stride,
    mass_ptr,  # float32 [B, R - 1, PLACES, CHUNKS, CHUNK / BLOCK]
    chain_ptr,  # int64 [B, WIDTH]
    emitted_ptr,  # int32 [B]
    target_ptr,  # [num_logits, V]
    target_stride,
    token_ptr,  # [num_logits]
    cu_ptr,  # [B + 1]
    index_ptr,  # [B] -> max_num_reqs
    offset_ptr,  # int32 [B, R]
    count_ptr,  # int32 [B, R]
    temperature_ptr,  # float32 [max_num_reqs]
    threshold_ptr,  # float32 [num_logits], with FILTERED
    seed_ptr,  # int64 [max_num_reqs]
    draw_ptr,  # int64 [max_num_reqs]
    stream,
    first_draw,
    chunks,
    vocab_size,
    ROWS: tl.constexpr,
    BRANCHES: tl.constexpr,  # lanes of the rows but the chain
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    FILTERED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    state = tl.load(index_ptr + request).to(tl.int64)
    lane = tl.arange(0, LANES)
    branch = tl.arange(0, BRANCHES) + 1
    emitted = tl.load(chain_ptr + request * WIDTH + lane, mask=lane < WIDTH, other=-1)
    count = tl.load(emitted_ptr + request)
    begin = tl.load(cu_ptr + request).to(tl.int64)
    rows = token_ptr + begin, offset_ptr + request * ROWS, count_ptr + request * ROWS
    offset, tokens, ids, is_open = _open_branches(
        emitted, count, rows, branch, branch < ROWS, PLACES, LANES
    )
    temperature = tl.load(temperature_ptr + state)
    seed = tl.load(seed_ptr + state)
    draw = tl.load(draw_ptr + state) + first_draw
    winner = tl.zeros((), tl.int32)
    while tl.max(is_open, axis=0) > 0:
        winner = tl.min(tl.where(is_open > 0, branch, ROWS), axis=0)
        row = begin + extract_lane(offset, branch, winner) + count
        slot = (request * (ROWS - 1) + winner - 1) * PLACES + count
        threshold = float("-inf")
        if FILTERED:
            threshold = tl.load(threshold_ptr + row)
        masses_ptr = mass_ptr + slot * chunks * (CHUNK // BLOCK)
        stats = stats_ptr + slot * chunks, stats_stride, masses_ptr, chunks
        own = target_ptr + row * target_stride, temperature, threshold
        key = seed, stream, draw + count
        token, lse = drawn_token(stats, own, key, vocab_size, CHUNK, BLOCK, CHUNKS)
        # No token follows where the target's distribution is not one.
        token = tl.where(is_finite(lse), token, -1)
        emitted = tl.where(lane == count, token, emitted)
        here = tl.sum(tl.where((lane == count)[None, :], ids, 0), axis=1)
        goes_on = (here == token) & (tokens > count) & (token >= 0)
        is_open = tl.where(goes_on, is_open, 0)
        count += (token >= 0).to(tl.int32)
    tl.store(out_ptr + request * PLACES + lane, emitted, mask=lane < PLACES)
    tl.store(count_out_ptr + request, count)
    tl.store(winner_ptr + request, winner)


def follow_branches(
    chain: ChainResult,
    target_logits: torch.Tensor,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    draws: torch.Tensor,
    *,
    max_tokens: int,
    level: int = 1,
    thresholds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> WalkResult:
    """Go on along branches from what ``verify_chain_padded`` emitted, on the same layout.

    A request's inputs are its chain, after the root, then root and tokens of each branch. Nothing
    is read on the host. Tokens follow the rule of the chain: the target's argmax at temperature 0,
    a draw above it, and below it the argmax of the perturbed logits at the row's position. A row
    that is not a distribution ends the walk.

    Args:
        chain: of these requests; its drafts have at most max_tokens tokens.
        target_logits: [num_logits, V], the target's after each input.
        draft_sampled: int64 or int32 [num_logits], the input token of each row.
        cu_num_logits: int64 or int32 [B + 1].
        idx_mapping: int64 or int32 [B], slot of each request.
        offsets: int32 [B, R], place of the root of each row among its request's inputs; the first
            row is the chain.
        counts: int32 [B, R], inputs of each row with its root; 0 for no row.
        temperature, seeds, draws, level: as in ``verify_chain_padded``. The token after `place`
            tokens is drawn with draw number draws + FIRST_DRAW + place.
        max_tokens: most tokens of a row after its root, at most 63.
        thresholds: float32 [num_logits], as there.
        positions: int64 [num_logits], as there: a branch's are those of its own row.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; names the argument.
    """
    device, inputs = target_logits.device, target_logits.shape[0]
    check_logits("target_logits", target_logits, 2)
    batch, width = chain.token_ids.shape
    rows, places = offsets.shape[-1], max_tokens + 1
    if not 1 <= max_tokens <= MAX_KERNEL_DRAFT or width > places:
        raise ValueError(
            f"max_tokens must be in [{max(width - 1, 1)}, {MAX_KERNEL_DRAFT}], got {max_tokens}."
        )
    for name, values in (("offsets", offsets), ("counts", counts)):
        if values.shape != (batch, rows) or rows < 2:
            raise ValueError(f"{name} must be [{batch}, R >= 2], got {list(values.shape)}.")
        check_vector(name, values.reshape(-1), None, (torch.int32,), device)
    check_vector("draft_sampled", draft_sampled, inputs, _INTEGERS, device)
    check_vector("cu_num_logits", cu_num_logits, batch + 1, _INTEGERS, device)
    check_vector("idx_mapping", idx_mapping, batch, _INTEGERS, device)
    check_vector("temperature", temperature, None, (torch.float32,), device)
    check_vector("seeds", seeds, len(temperature), (torch.int64,), device)
    check_vector("draws", draws, len(temperature), (torch.int64,), device)
    if thresholds is not None:
        check_vector("thresholds", thresholds, inputs, (torch.float32,), device)
    if positions is not None:
        check_vector("positions", positions, inputs, (torch.int64,), device)
    result = WalkResult(
        torch.empty(batch, places, dtype=torch.int64, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
    )
    if batch == 0:
        return result
    vocab_size = target_logits.shape[1]
    chunk, block, chunks = tile_shape(vocab_size)
    shape = batch, rows - 1, places, chunks
    stats = torch.empty(2, *shape, dtype=torch.float32, device=device)
    mass = torch.empty(*shape, chunk // block, dtype=torch.float32, device=device)
    walked = (
        chain.token_ids,
        chain.num_emitted,
        target_logits,
        target_logits.stride(0),
        draft_sampled,
        cu_num_logits,
        idx_mapping,
        offsets,
        counts,
        temperature,
        temperature if thresholds is None else thresholds,
        seeds,
    )
    shared = {
        "ROWS": rows,
        "PLACES": places,
        "WIDTH": width,
        "LANES": padded_size(places),
        "FILTERED": thresholds is not None,
        "CHUNK": chunk,
        "BLOCK": block,
        "num_warps": NUM_WARPS,
    }
    branch_stats_kernel[(chunks, (rows - 1) * places, batch)](
        stats,
        stats[0].numel(),
        mass,
        *walked,
        seeds if positions is None else positions,
        vocab_size,
        COUPLED=positions is not None,
        **shared,
    )
    walk_kernel[(batch,)](
        *result,
        stats,
        stats[0].numel(),
        mass,
        *walked,
        draws,
        stream_of(level, lowest=1),
        FIRST_DRAW,
        chunks,
        vocab_size,
        BRANCHES=padded_size(rows - 1),
        CHUNKS=padded_size(chunks),
        **shared,
    )
    return result
