"""The two kernels of tree verification.

tree_verify.py launches them; README.md in this directory derives them. The root has row 0, node i
has row i + 1.
"""

import triton
import triton.language as tl

from vllm_hsd.kernels.blocks import (
    block_masses,
    exp_shifted,
    extract_lane,
    inverse_cdf_index,
    is_finite,
    load_scaled,
    logsumexp_of_chunks,
    store_max_and_sum,
)
from vllm_hsd.kernels.rng import uniform


@triton.jit(do_not_specialize=["stats_stride"])
def node_stats_kernel(
    stats_ptr,  # float32 [4, B, N + 1, CHUNKS]: max, sum of exp(x - max) of target; of draft
    stats_stride,  # B * (N + 1) * CHUNKS
    target_ptr,  # [B, N + 1, V]
    draft_ptr,  # [B, N + 1, V]
    token_ptr,  # [B, N]
    parent_ptr,  # [B, N]
    temperature_ptr,  # float32 [B]
    draft_temperature_ptr,  # float32 [B]
    vocab_size,
    NODES: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    index = tl.arange(0, LANES)
    parent = tl.load(parent_ptr + request * NODES + index, mask=index < NODES, other=-2)
    token = tl.load(token_ptr + request * NODES + index, mask=index < NODES, other=-1)
    children = (parent == row - 1) & (token >= 0) & (token < vocab_size)
    # A leaf's row matters only if the leaf is accepted.
    if tl.sum(children.to(tl.int32), axis=0) > 0:
        flat = request * (NODES + 1) + row
        entry = chunk * CHUNK + tl.arange(0, CHUNK)
        at = stats_ptr + flat * tl.num_programs(0) + chunk
        inv_temperature = 1.0 / tl.load(temperature_ptr + request)
        x = load_scaled(target_ptr + flat * vocab_size, entry, vocab_size, inv_temperature)
        store_max_and_sum(at, stats_stride, x)
        inv_temperature = 1.0 / tl.load(draft_temperature_ptr + request)
        x = load_scaled(draft_ptr + flat * vocab_size, entry, vocab_size, inv_temperature)
        store_max_and_sum(at + 2 * stats_stride, stats_stride, x)


@triton.jit
def _remaining_row(
    entry,
    row,
    end,
    tree,
    scales,
    vocab_size,
    NODES: tl.constexpr,
):
    """A row's residual after its children before node ``end``, unnormalized, at ``entry``.

    tree: the request's pointers; scales: 1 / T of target and draft.
    Returns (weights, the row's proposal).
    """
    target_ptr, draft_ptr, state_ptr, token_ptr, parent_ptr = tree
    target_lse = tl.load(state_ptr + row)
    draft_lse = tl.load(state_ptr + NODES + 1 + row)
    factor_ptr = state_ptr + 4 * (NODES + 1)
    inv_temperature, inv_draft_temperature = scales
    target_row_ptr = target_ptr + row.to(tl.int64) * vocab_size
    draft_row_ptr = draft_ptr + row.to(tl.int64) * vocab_size
    x = load_scaled(target_row_ptr, entry, vocab_size, inv_temperature)
    weight = tl.exp(x - target_lse)
    x = load_scaled(draft_row_ptr, entry, vocab_size, inv_draft_temperature)
    proposal = tl.exp(x - draft_lse)
    # Children come after their parent, which is node row - 1.
    for child in range(row, end):
        token = tl.load(token_ptr + child).to(tl.int32)
        is_child = tl.load(parent_ptr + child) == row - 1
        if is_child & (token >= 0) & (token < vocab_size):
            factor = tl.load(factor_ptr + child)
            if factor > 0:
                weight = tl.maximum(factor * weight - proposal, 0.0)
    return weight, proposal


@triton.jit(do_not_specialize=["stats_stride", "stream"])
def traverse_kernel(
    out_ptr,  # int64 [B, N + 1]
    path_ptr,  # int64 [B, N]
    count_ptr,  # int32 [2, B]: accepted; emitted
    state_ptr,  # float32 [B, 5, N + 1]: logsumexp of target, draft; a; mass; factor (by node)
    mass_ptr,  # float32 [B, CHUNKS, CHUNK / BLOCK], of the row measured last
    stats_ptr,  # float32 [4, B, N + 1, CHUNKS], see node_stats_kernel
    stats_stride,  # B * (N + 1) * CHUNKS
    target_ptr,  # [B, N + 1, V]
    draft_ptr,  # [B, N + 1, V]
    token_ptr,  # [B, N]
    parent_ptr,  # [B, N]
    temperature_ptr,  # float32 [B]
    draft_temperature_ptr,  # float32 [B]
    seed_ptr,  # int64 [B]
    draw_ptr,  # int64 [B]
    stream,
    vocab_size,
    chunks,
    NODES: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    rows: tl.constexpr = NODES + 1
    parts: tl.constexpr = CHUNK // BLOCK
    inv_temperature = 1.0 / tl.load(temperature_ptr + request)
    inv_draft_temperature = 1.0 / tl.load(draft_temperature_ptr + request)
    target_ptr += request * rows * vocab_size
    draft_ptr += request * rows * vocab_size
    token_ptr += request * NODES
    parent_ptr += request * NODES
    state_ptr += request * 5 * rows
    mass_ptr += request * chunks * parts
    stats_ptr += request * rows * chunks
    factor_ptr = state_ptr + 4 * rows
    tree = target_ptr, draft_ptr, state_ptr, token_ptr, parent_ptr
    scales = inv_temperature, inv_draft_temperature
    index = tl.arange(0, LANES)
    token = tl.load(token_ptr + index, mask=index < NODES, other=-1).to(tl.int32)
    parent = tl.load(parent_ptr + index, mask=index < NODES, other=-2).to(tl.int32)
    valid = (token >= 0) & (token < vocab_size)
    c = tl.arange(0, CHUNKS)
    row = tl.zeros((), tl.int32)
    next_token = tl.full((), -1, tl.int64)
    walking = tl.full((), 1, tl.int32)
    seed = tl.load(seed_ptr + request)
    draw = tl.load(draw_ptr + request)
    u = uniform(seed, stream, draw + 1 + index)
    # Leaves have no statistics; what is stored there is not used.
    r = tl.arange(0, ROWS)
    slot = stats_ptr + r[:, None] * chunks + c[None, :]
    inside = (r < rows)[:, None] & (c < chunks)[None, :]
    maximum = tl.load(slot, mask=inside, other=float("-inf"))
    lse = logsumexp_of_chunks(maximum, tl.load(slot + stats_stride, mask=inside, other=0.0))
    tl.store(state_ptr + r, lse, mask=r < rows)
    maximum = tl.load(slot + 2 * stats_stride, mask=inside, other=float("-inf"))
    lse = logsumexp_of_chunks(maximum, tl.load(slot + 3 * stats_stride, mask=inside, other=0.0))
    tl.store(state_ptr + rows + r, lse, mask=r < rows)
    tl.store(factor_ptr + index, tl.zeros_like(u).to(tl.float32), mask=index < NODES)
    tl.debug_barrier()
    row_ptr = state_ptr + parent + 1
    valid = valid & is_finite(tl.load(row_ptr, mask=valid, other=0.0))
    valid = valid & is_finite(tl.load(row_ptr + rows, mask=valid, other=0.0))

    seen = tl.full((), -1, tl.int32)  # last child of the row that was visited
    measured = tl.zeros((), tl.int32)  # whether mass_ptr holds the row as it is now
    a = tl.full((), 1.0, tl.float32)
    scale = tl.full((), 1.0, tl.float32)  # mass of the residual of the row
    while walking > 0:
        failed = tl.full((), -1, tl.int32)
        siblings = valid & (parent == row - 1)
        child = tl.min(tl.where(siblings & (index > seen), index, NODES), axis=0)
        if child < NODES:
            seen = child
            x = tl.load(token_ptr + child).to(tl.int32)
            weight, proposal = _remaining_row(x, row, child, tree, scales, vocab_size, NODES)
            ratio = a / scale * weight / tl.where(proposal > 0, proposal, 1.0)
            # A token that was drawn twice is one node: the first one, where its children are.
            again = tl.sum((siblings & (index < child) & (token == x)).to(tl.int32), axis=0)
            possible = (proposal > 0) & (again == 0)
            below = tl.where(possible, tl.minimum(ratio, 1.0), 0.0)
            if below > 0:
                tl.store(state_ptr + 2 * rows + row, a)
                tl.store(state_ptr + 3 * rows + row, scale)
                row = child + 1
                a = below
                scale = tl.full((), 1.0, tl.float32)
                measured = tl.zeros((), tl.int32)
            else:
                failed = child
        elif (row == 0) | (extract_lane(u, index, row - 1) < a.to(tl.float64)):
            walking = tl.zeros((), tl.int32)
        else:
            failed = row - 1
            seen = failed
            row = tl.load(parent_ptr + failed).to(tl.int32) + 1
            tl.debug_barrier()
            a = tl.load(state_ptr + 2 * rows + row)
            scale = tl.load(state_ptr + 3 * rows + row)
        if failed >= 0:
            more = valid & (parent == row - 1) & (index > failed)
            more_left = tl.sum(more.to(tl.int32), axis=0) > 0
            # a only decreases: a node that would fail now and has no more children has failed.
            hopeless = (row > 0) & (extract_lane(u, index, row - 1) >= a.to(tl.float64))
            measured = tl.zeros((), tl.int32)
            if more_left | (hopeless == 0):
                tl.debug_barrier()
                tl.store(factor_ptr + failed, a / scale)
                tl.debug_barrier()
                total = tl.zeros((), tl.float32)
                for chunk in range(0, chunks):
                    weight, _ = _remaining_row(
                        chunk * CHUNK + tl.arange(0, CHUNK),
                        row,
                        failed + 1,
                        tree,
                        scales,
                        vocab_size,
                        NODES,
                    )
                    masses = block_masses(weight, CHUNK, BLOCK)
                    tl.store(mass_ptr + chunk * parts + tl.arange(0, parts), masses)
                    total += tl.sum(masses, axis=0)
                # Where nothing is left of a, no later child brings it back.
                a = tl.where(a < 1.0, tl.where(a > 0.0, total / (total + 1.0 - a), 0.0), 1.0)
                tl.debug_barrier()
                if total > 0:
                    scale = total
                    measured = tl.full((), 1, tl.int32)
                else:
                    tl.store(factor_ptr + failed, 0.0)
                    # The next child's remaining row is scaled by it.
                    tl.debug_barrier()

    # The walk ends here: draw from the residual of this row.
    target_row_ptr = target_ptr + row.to(tl.int64) * vocab_size
    is_leaf = tl.sum((valid & (parent == row - 1)).to(tl.int32), axis=0) == 0
    if measured == 0:
        for chunk in range(0, chunks):
            entry = chunk * CHUNK + tl.arange(0, CHUNK)
            if is_leaf:
                x = load_scaled(target_row_ptr, entry, vocab_size, inv_temperature)
                chunk_max = tl.max(x, axis=0)
                weight = exp_shifted(x, chunk_max)
                tl.store(stats_ptr + row * chunks + chunk, chunk_max)
            else:
                weight, _ = _remaining_row(entry, row, seen + 1, tree, scales, vocab_size, NODES)
            masses = block_masses(weight, CHUNK, BLOCK)
            tl.store(mass_ptr + chunk * parts + tl.arange(0, parts), masses)
        tl.debug_barrier()
    b = tl.arange(0, CHUNKS * parts)
    inside = b < chunks * parts
    mass = tl.load(mass_ptr + b, mask=inside, other=0.0)
    slot = stats_ptr + row * chunks + b // parts
    maximum = tl.load(slot, mask=inside & is_leaf, other=float("-inf"))
    row_max = tl.max(maximum, axis=0)
    mass = tl.where(is_leaf, mass * exp_shifted(maximum, row_max), mass).to(tl.float64)
    total = tl.sum(mass, axis=0)
    goal = uniform(seed, stream, draw) * total
    if total > 0:
        chosen, before = inverse_cdf_index(mass, b, goal)
        entry = chosen * BLOCK + tl.arange(0, BLOCK)
        if is_leaf:
            x = load_scaled(target_row_ptr, entry, vocab_size, inv_temperature)
            weight = exp_shifted(x, row_max)
        else:
            weight, _ = _remaining_row(entry, row, seen + 1, tree, scales, vocab_size, NODES)
        drawn, _ = inverse_cdf_index(weight.to(tl.float64), entry, goal - before)
        next_token = drawn.to(tl.int64)
    elif row == 0:
        # The root's row is invalid: vLLM's softmax of it is NaN everywhere and the argmax of
        # NaN is token 0.
        next_token = tl.zeros((), tl.int64)

    # Ancestors come before their descendants: a node's position is its rank among the accepted.
    on_path = index < 0
    node = row - 1
    while node >= 0:
        on_path = on_path | (index == node)
        node = tl.load(parent_ptr + node).to(tl.int32)
    accepted = tl.sum(on_path.to(tl.int32), axis=0)
    position = tl.cumsum(on_path.to(tl.int32), axis=0) - 1
    out_ptr += request * rows
    path_ptr += request * NODES
    tl.store(out_ptr + position, token.to(tl.int64), mask=on_path)
    tl.store(path_ptr + position, index.to(tl.int64), mask=on_path)
    tl.store(out_ptr + accepted, next_token)
    nothing = tl.full([ROWS], -1, tl.int64)
    column = tl.arange(0, ROWS)
    tl.store(out_ptr + column, nothing, mask=(column > accepted) & (column < rows))
    tl.store(path_ptr + column, nothing, mask=(column >= accepted) & (column < NODES))
    num_requests = tl.num_programs(0)
    tl.store(count_ptr + request, accepted)
    tl.store(count_ptr + num_requests + request, accepted + (next_token >= 0).to(tl.int32))
