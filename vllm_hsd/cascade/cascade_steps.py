"""The steps between the forward passes of a proposal.

`stage` runs before the captured program and is the only one that reads the runner's tensors, but
for the block tables and the text that lookups search, whose memory never moves. The others read and
write a `ProposalState`. Nothing is read on the host, and grids depend only on shapes.
"""

import torch
import triton

from vllm_hsd.cascade.proposal_state import KVGroups, ProposalState
from vllm_hsd.cascade.schedule import DRAWS_PER_LENGTH, Draft, Schedule, Verify
from vllm_hsd.kernels import commit_kernels, step_kernels
from vllm_hsd.kernels.blocks import padded_size
from vllm_hsd.kernels.chain_verify import ChainResult

# Entries of a row that one program copies: four 16-byte loads per thread in bfloat16.
COPY_CHUNK = 8192
COPY_WARPS = 8


def stage(
    state: ProposalState,
    schedule: Schedule,
    *,
    index: torch.Tensor,
    text: torch.Tensor,
    length: torch.Tensor,
    num_sampled: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    most_drafted: torch.Tensor,
    scales: torch.Tensor,
    max_model_len: int,
    verified: int = -1,
) -> None:
    """Begin a proposal: read what the target's step has left and forget the last proposal.

    A request drafts nothing if it has sampled nothing, if its text is shorter than the window, if
    it is to draft nothing, or if there is no room before max_model_len.

    Args:
        state: of at least len(index) requests; the others become padding.
        schedule: what will run.
        index: int32 [num_reqs], request slots of the batch.
        text: int32 [max_num_reqs, max_model_len or more], all tokens of the requests.
        length: int32 [max_num_reqs], tokens in the text, the one just sampled included.
        num_sampled: int32 [num_reqs], tokens that each request has sampled in this step.
        temperature: float32 [max_num_reqs]; 0 is greedy, a negative one coupled.
        top_k, top_p, min_p: [max_num_reqs], see `Filters`.
        seeds: int64 [max_num_reqs].
        most_drafted: int32 [max_num_reqs], most tokens of a proposal.
        scales: float32 [L], factor on the temperature for each level.
        max_model_len: most tokens of a text.
        verified: the level whose drafts the target has verified in this step.
    """
    state.row_of_slot.fill_(-1)
    step_kernels.stage_kernel[(state.batch,)](
        state.num_reqs,
        *state.windows,
        state.base,
        state.end,
        *state.drafts,
        state.draft_lengths,
        state.limit,
        state.slot,
        state.temperature,
        state.temperature.stride(0),
        *state.filters,
        state.seeds,
        state.draws,
        state.row_of_slot,
        state.counts[verified],
        index,
        text,
        text.stride(0),
        length,
        num_sampled,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        most_drafted,
        scales,
        index.shape[0],
        max_model_len,
        DRAWS_PER_LENGTH=DRAWS_PER_LENGTH,
        WINDOW=schedule.window,
        MARGIN=schedule.margin,
        HORIZONTAL=schedule.horizontal_tokens,
        LANES=padded_size(schedule.window),
        LEVELS=schedule.num_levels,
        num_warps=1,
    )


def place(
    state: ProposalState,
    schedule: Schedule,
    op: Draft | Verify,
    groups: KVGroups,
    max_model_len: int,
    *,
    committed_too: bool = True,
    lanes: int = 0,
) -> None:
    """Write the inputs of an op's forward pass, and for a verification what it verifies.

    The fed tokens are the last ones of the text, for a verification with a whole draft below. A KV
    entry is written where the position is at most the request's limit, and where it still drafts or
    that limit is the end of its text, as of requests that draft nothing.

    Args:
        state, schedule, op: what runs.
        groups: block tables of the KV-cache groups.
        max_model_len: positions end before it.
        committed_too: False for a level in the target's own cache (early exits): it leaves the
            entries of committed tokens alone, but for the last one, which the target lacks.
        lanes: most tokens that any op feeds for a request, where kernels serve all; 0: this one's.
    """
    verifies = isinstance(op, Verify)
    step_kernels.place_kernel[(state.batch, groups.block_sizes.shape[0])](
        state.input_ids,
        state.positions,
        state.seq_lens,
        state.query_start_loc,
        state.slot_mapping,
        state.slot_mapping.stride(0),
        state.sampled,
        state.origin,
        state.num_reqs,
        *state.windows,
        state.base,
        state.end,
        *state.drafts,
        state.limit,
        state.slot,
        *groups,
        max_model_len,
        op.draft_length if isinstance(op, Verify) else 0,
        op.query_length,
        LEVEL=op.level,
        LEVELS=schedule.num_levels,
        VERIFIES=verifies,
        LANES=padded_size(lanes or op.query_length),
        WINDOW=schedule.window,
        COMMITTED_TOO=committed_too,
        num_warps=1,
    )


def commit_draft(
    state: ProposalState,
    op: Draft,
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    lse: torch.Tensor,
    thresholds: torch.Tensor,
) -> None:
    """Append the tokens that level 0 drew, with the rows that they were drawn from.

    Args:
        logits: [B, V] of level 0's dtype, contiguous rows.
        token_ids: int64 [B].
        lse: float32 [B], as `sample_row` returns it.
        thresholds: float32 [B] of the rows, below which they are stored as -inf.

    Raises:
        ValueError: logits that are not of the rows' dtype or width.
    """
    rows = _rows(state, 0, logits)
    own = token_ids, lse, thresholds, logits, logits.stride(0)
    # There is no draft from below.
    _append(state, 0, 0, 0, rows, state.origin, own, op.step, adds=True)


def commit_verify(
    state: ProposalState,
    op: Verify,
    logits: torch.Tensor,
    result: ChainResult,
    thresholds: torch.Tensor,
) -> None:
    """Append what a level's verification emitted, with its rows, and open new drafts below it.

    Args:
        logits: [B * (n + 1), V] of the level's dtype, contiguous rows.
        result: of the verification of `state.sampled` by these logits; its drafts may be longer.
        thresholds: float32 [B * (n + 1)] of the rows, below which they are stored as -inf.

    Raises:
        ValueError: logits that are not of the rows' dtype or width.
    """
    rows, longest = _rows(state, op.level, logits), result.token_ids.shape[1] - 1
    vocab_size = rows.shape[2]
    commit_kernels.commit_verify_kernel[(state.batch, triton.cdiv(vocab_size, COPY_CHUNK))](
        rows,
        state.lse[op.level],
        *state.windows,
        state.end,
        *state.drafts,
        state.draft_lengths,
        state.counts,
        state.origin,
        state.temperature[op.level],
        result.token_ids,
        result.num_accepted,
        result.num_emitted,
        result.target_lse,
        thresholds,
        logits,
        logits.stride(0),
        vocab_size,
        op.draft_length + 1,
        LEVEL=op.level,
        DRAFT=longest,
        LANES=padded_size(longest + 1),
        N=rows.shape[1],
        CHUNK=min(COPY_CHUNK, padded_size(vocab_size)),
        num_warps=COPY_WARPS,
    )


def commit_unverified(
    state: ProposalState,
    op: Verify,
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    lse: torch.Tensor,
    thresholds: torch.Tensor,
    taken: torch.Tensor,
) -> None:
    """Append a draft from below as it is, and the token that a level drew after it.

    Each token keeps the row that it was drawn from; one of a lookup gets the row of a point mass.

    Args:
        logits: [B, V] of the level's dtype, contiguous rows.
        token_ids, lse, thresholds: as for `commit_draft`.
        taken: int32 [B], tokens of the draft from below, not in the memory of `state.drafted`.

    Raises:
        ValueError: logits that are not of the rows' dtype or width.
    """
    rows = _rows(state, op.level, logits)
    own = token_ids, lse, thresholds, logits, logits.stride(0)
    longest = state.lse[op.level - 1].shape[1]
    _append(state, op.level, op.level - 1, longest, rows, taken, own, adds=True)


def begin_tail(state: ProposalState, schedule: Schedule) -> None:
    """Let level 0 draft the horizontal tokens after the top level's draft, where that has any."""
    drafted = state.drafted[-1]
    state.start[0], state.requested[0] = state.end, (drafted > 0) * schedule.horizontal_tokens
    state.drafted[0].zero_()
    state.requested[-1] = drafted + state.requested[0]
    state.origin.copy_(torch.where(drafted > 0, drafted, -1))


def append_tail(state: ProposalState, schedule: Schedule) -> None:
    """Make level 0's draft part of the top level's, with the rows that it was drawn from."""
    pass_on(state, schedule.num_levels - 1, schedule.horizontal_tokens, feeder=0)


def pass_on(state: ProposalState, level: int, longest: int, *, feeder: int | None = None) -> None:
    """Make the draft from below that of a level which adds nothing to it.

    Args:
        longest: most tokens of it.
        feeder: the level that has drafted it; None for the one right below.
    """
    feeder = level - 1 if feeder is None else feeder
    rows, taken = state.rows[level], state.drafted[feeder].clone()
    assert rows is not None
    nothing = taken, state.lse[level], state.lse[level], rows, 0
    _append(state, level, feeder, longest, rows, taken, nothing, adds=False)


def _append(
    state: ProposalState,
    level: int,
    feeder: int,
    longest: int,
    rows: torch.Tensor,
    taken: torch.Tensor,
    own: tuple[torch.Tensor | int, ...],
    step: int = 0,
    *,
    adds: bool,
) -> None:
    """Append a draft of `feeder`, of at most `longest` tokens, and the token of `own` after it."""
    vocab_size, below = rows.shape[2], state.rows[feeder]
    commit_kernels.commit_unverified_kernel[(state.batch, triton.cdiv(vocab_size, COPY_CHUNK))](
        rows,
        state.lse[level],
        *state.windows,
        state.end,
        *state.drafts,
        state.draft_lengths,
        state.counts,
        state.origin,
        state.temperature[level],
        rows if below is None else below,
        state.lse[feeder],
        taken,
        *own,
        vocab_size,
        step,
        HAS_ROWS=below is not None,
        ADDS=adds,
        BELOW=state.lse[feeder].shape[1],
        LEVEL=level,
        LANES=padded_size(longest + 1),
        N=rows.shape[1],
        CHUNK=min(COPY_CHUNK, padded_size(vocab_size)),
        num_warps=COPY_WARPS,
    )


def collect(state: ProposalState, schedule: Schedule, drafter: int = -1) -> None:
    """Write the top level's draft, which is `drafter`'s, where the target's step reads it."""
    top = schedule.num_levels - 1
    step_kernels.collect_kernel[(state.batch,)](
        state.draft_tokens,
        state.draft_length,
        *state.windows,
        state.end,
        state.drafted[top],
        state.counts[drafter],
        WINDOW=schedule.window,
        LONGEST=schedule.num_speculative_tokens,
        LANES=padded_size(schedule.num_speculative_tokens),
        num_warps=1,
    )


def _rows(state: ProposalState, level: int, logits: torch.Tensor) -> torch.Tensor:
    """The rows of a level's draft, into which `logits` can be copied as they are."""
    rows = state.rows[level]
    # Rounding after the draw would make the rows others than those drawn from.
    if rows is None or rows.dtype != logits.dtype or rows.shape[2] != logits.shape[1]:
        expected = "none" if rows is None else f"{rows.dtype} with {rows.shape[2]} entries"
        raise ValueError(
            f"logits of levels[{level}] are {logits.dtype} with {logits.shape[1]} entries, but "
            f"its rows are {expected}: allocate the state for the level's logits."
        )
    if logits.stride(1) != 1 or not rows.is_contiguous():
        raise ValueError(f"logits and rows of levels[{level}] must have contiguous rows.")
    return rows
