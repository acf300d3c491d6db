"""Verification of one draft per request on logits, in 3 launches.

The rule is that of ``vllm_hsd.rules.verify_chain``: block verification (Sun et al., "Block
Verification Accelerates Speculative Decoding", arXiv:2403.10444) or standard rejection sampling
(Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
arXiv:2211.17192). README.md in this directory has the derivation, the byte count and the traps.
Launch 1 reads each target row of the draft once, and each proposal row unless its logsumexp is
given. Launch 2 reads the residual rows that can still decide. Launch 3 decides, and reads again
the one block that holds the next token.
"""

from typing import NamedTuple

import torch

from vllm_hsd.kernels.blocks import NUM_WARPS, check_logits, check_vector, padded_size, tile_shape
from vllm_hsd.kernels.chain_kernels import row_stats_kernel, verify_kernel
from vllm_hsd.kernels.rng import stream_of
from vllm_hsd.rules import MAX_KERNEL_DRAFT

METHODS = ("block", "standard")
_INTEGERS = (torch.int64, torch.int32)


class ChainResult(NamedTuple):
    """Result of chain verification for B requests.

    Attributes:
        token_ids: int64 [B, max_draft_tokens + 1], the emitted tokens, then -1.
        num_accepted: int32 [B], accepted draft tokens.
        num_emitted: int32 [B], accepted tokens and the recovered or bonus token after them. That
            one is missing only after an accepted token whose target row is invalid at a
            temperature above 0, and for a padded request without rows.
        target_lse: float32 [B, max_draft_tokens + 1], log(sum(exp(target / temperature))) of the
            target's rows 0 .. num_accepted, from which the emitted tokens would be drawn, and NaN
            after them; 0 at temperature 0. A level that verifies passes it on as draft_lse.
    """

    token_ids: torch.Tensor
    num_accepted: torch.Tensor
    num_emitted: torch.Tensor
    target_lse: torch.Tensor


def verify_chain_padded(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    draws: torch.Tensor,
    *,
    max_draft_tokens: int,
    method: str = "block",
    level: int = 1,
    draw_offset: int = 0,
    draft_temperature: torch.Tensor | None = None,
    draft_lse: torch.Tensor | None = None,
    draft_index: torch.Tensor | None = None,
    draft_length: torch.Tensor | None = None,
    thresholds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    position_skip: int = 0,
) -> ChainResult:
    """Verify a ragged batch of drafts; the emitted tokens follow softmax(target / temperature).

    On the layout of vLLM's V2 runner, which keeps state per request slot.

    Nothing is read on the host, so lengths, tokens and rows are not checked there. A slot whose
    token is negative or outside the vocabulary is empty and ends the draft. So does, at a
    temperature above 0, an invalid row (a NaN or +inf in it, or only -inf), as in
    ``vllm_hsd.rules.verify_chain``. A draft longer than max_draft_tokens is cut there, before
    its tokens are looked at.

    A request whose own row, the first one, is invalid emits the token that vLLM emits without
    speculation. At temperature 0 that is the argmax of any row, with NaN as the maximum: the
    first NaN, else the first maximum, and token 0 if all are -inf. Above it, it is token 0, and
    nothing is accepted: softmax makes an invalid row NaN everywhere. vLLM's V2 runner differs in
    one such row: it takes a +inf.

    Args:
        target_logits: [num_logits, V] bfloat16, float16 or float32, num_logits = sum(n_i + 1); row
            t of a request is the target's after its first t draft tokens.
        draft_logits: [D, K, V], K >= max_draft_tokens, the rows the tokens were drawn from, before
            temperature; or None (one-hot).
        draft_sampled: int64 or int32 [num_logits], the input token of each row: the t-th
            draft token of a request is at its row t. -1 in an empty slot.
        cu_num_logits: int64 or int32 [B + 1]; a request may have no row at all.
        idx_mapping: int64 or int32 [B], slot of each request.
        temperature: float32 [max_num_reqs] of the target; 0 is greedy. Where the target's logits
            are scaled already, pass 1 (0 if greedy) and the draft's as draft_temperature.
        seeds: int64 [max_num_reqs], request seeds.
        draws: int64 [max_num_reqs], first draw of the request. A call uses draws .. draws + n_i, so
            the next one needs a number that is higher by n_i + 1.
        max_draft_tokens: upper bound of n_i, at most 63; fixes the grid.
        method: "block" or "standard".
        level: the verifying level, whose uniforms are used; level 0 only drafts.
        draw_offset: added to every entry of draws.
        draft_temperature: float32 [max_num_reqs] at which the draft was drawn, 0 where its rows are
            one-hot; by default that of the target.
        draft_lse: float32 [D, K], contiguous rows, log(sum(exp(draft_logits / draft_temperature)))
            as ``sample_row`` returns it; saves one read of every proposal row.
        draft_index: int64 or int32 [B], entry of draft_logits, draft_lse and draft_length that
            belongs to each request; -1 for none, and then nothing of its draft is looked at. By
            default idx_mapping, with D = max_num_reqs.
        draft_length: int64 or int32 [D], so many draft tokens are looked at; None for all.
        thresholds: float32 [num_logits] of ``row_thresholds`` for the target's rows; tokens below
            it have no probability. Draft rows must hold -inf for what they cannot draw.
        positions: int64 [num_logits + B * position_skip], the position of each row's input token,
            for requests of a negative temperature. These are coupled: their tokens are the argmax
            of target / -temperature plus the noise that plain vLLM draws with at these positions,
            and a draft token is accepted if it is that token.
        position_skip: so many positions lie before those of every request's rows.

    Returns:
        ChainResult on the device of target_logits; a request without rows emits nothing.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; names the argument.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    if not 0 <= max_draft_tokens <= MAX_KERNEL_DRAFT:
        raise ValueError(
            f"max_draft_tokens must be in [0, {MAX_KERNEL_DRAFT}], got {max_draft_tokens}."
        )
    stream = stream_of(level, lowest=1)
    check_logits("target_logits", target_logits, 2)
    device, (inputs, vocab_size) = target_logits.device, target_logits.shape
    batch, slots = cu_num_logits.shape[0] - 1, temperature.shape[0]
    entries = slots if draft_index is None else None
    draft_index = idx_mapping if draft_index is None else draft_index
    draft_temperature = temperature if draft_temperature is None else draft_temperature
    for name, vector, size in (
        ("draft_sampled", draft_sampled, inputs),
        ("cu_num_logits", cu_num_logits, None),
        ("idx_mapping", idx_mapping, batch),
        ("draft_index", draft_index, batch),
    ):
        check_vector(name, vector, size, _INTEGERS, device)
    for name, vector, dtype in (
        ("temperature", temperature, torch.float32),
        ("draft_temperature", draft_temperature, torch.float32),
        ("seeds", seeds, torch.int64),
        ("draws", draws, torch.int64),
    ):
        check_vector(name, vector, slots, (dtype,), device)
    if thresholds is not None:
        check_vector("thresholds", thresholds, inputs, (torch.float32,), device)
    if positions is not None:
        check_vector("positions", positions, inputs + batch * position_skip, (torch.int64,), device)
    for name, value in (("draft_logits", draft_logits), ("draft_lse", draft_lse)):
        if value is None:
            continue
        entries = value.shape[0] if entries is None else entries
        if value.shape[0] != entries or value.shape[1] < max_draft_tokens:
            raise ValueError(
                f"{name} must have shape [{entries}, K, ...] with K >= {max_draft_tokens} (one "
                f"entry per slot, or per entry that draft_index counts), got {list(value.shape)}."
            )
    if draft_logits is not None:
        check_logits("draft_logits", draft_logits, 3)
        if draft_logits.shape[-1] != vocab_size or draft_logits.device != device:
            raise ValueError(
                f"draft_logits (vocabulary {draft_logits.shape[-1]}, {draft_logits.device}) does "
                f"not match target_logits (vocabulary {vocab_size}, {device})."
            )
    if draft_lse is not None and (draft_lse.dtype != torch.float32 or draft_lse.device != device):
        raise ValueError(f"draft_lse must be float32 on {device}.")
    if draft_length is not None:
        check_vector("draft_length", draft_length, entries, _INTEGERS, device)

    out = torch.empty(batch, max_draft_tokens + 1, dtype=torch.int64, device=device)
    # Rows of whole 16 bytes: kernels that read one are compiled for how it is aligned.
    counts = torch.empty(2, -(-batch // 4) * 4, dtype=torch.int32, device=device)
    row_lse = torch.empty(batch, max_draft_tokens + 1, dtype=torch.float32, device=device)
    result = ChainResult(out, counts[0, :batch], counts[1, :batch], row_lse)
    if batch == 0:
        return result
    chunk, block, chunks = tile_shape(vocab_size)
    shape = batch, max_draft_tokens + 1, chunks
    stats = torch.empty(4, *shape, dtype=torch.float32, device=device)
    mass = torch.empty(*shape, chunk // block, dtype=torch.float32, device=device)
    arrived = torch.empty(batch, dtype=torch.int32, device=device)
    if draft_logits is None:
        draft_lse = None
    # Arguments that a specialization does not read still have to be tensors.
    draft_rows = target_logits if draft_logits is None else draft_logits
    draft_strides = (0, 0) if draft_logits is None else draft_logits.stride()[:2]
    lse_values = temperature if draft_lse is None else draft_lse
    lse_strides = (0, 0) if draft_lse is None else draft_lse.stride()
    shared = {
        "HAS_LENGTH": draft_length is not None,
        "FILTERED": thresholds is not None,
        "MAX_DRAFT": max_draft_tokens,
        "ROWS": padded_size(max_draft_tokens + 1),
        "BLOCK": block,
        "CHUNK": chunk,
        "num_warps": NUM_WARPS,
    }
    requests = (
        draft_sampled,
        cu_num_logits,
        idx_mapping,
        draft_index,
        cu_num_logits if draft_length is None else draft_length,
        temperature,
        draft_temperature,
        temperature if thresholds is None else thresholds,
        seeds,
    )
    row_stats_kernel[(chunks, max_draft_tokens + 1, batch)](
        stats,
        stats[0].numel(),
        arrived,
        target_logits,
        target_logits.stride(0),
        draft_rows,
        *draft_strides,
        *requests,
        seeds if positions is None else positions,
        position_skip,
        vocab_size,
        READ_DRAFT=draft_logits is not None and draft_lse is None,
        COUPLED=positions is not None,
        **shared,
    )
    # Rows that are not read in 16-byte accesses take more registers: a quarter of a chunk at once.
    step = chunk if vocab_size % 16 == 0 else max(block, chunk // 4)
    for decide in (False, True):
        verify_kernel[(chunks, batch)](
            out,
            counts,
            row_lse,
            mass,
            stats,
            stats[0].numel(),
            arrived,
            target_logits,
            target_logits.stride(0),
            draft_rows,
            *draft_strides,
            lse_values,
            *lse_strides,
            *requests,
            draws,
            stream,
            draw_offset,
            vocab_size,
            counts.stride(0),
            DECIDE=decide,
            BLOCK_VERIFICATION=method == "block",
            HAS_DRAFT=draft_logits is not None,
            HAS_LSE=draft_lse is not None,
            STEP=step,
            CHUNKS=padded_size(chunks),
            **shared,
        )
    return result
