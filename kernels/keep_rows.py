"""Copy of proposal rows to where the verifier finds them."""

import torch
import triton
import triton.language as tl

from vllm_hsd.kernels.blocks import check_logits, check_vector, without_filtered

_CHUNK = 4096


@triton.jit(do_not_specialize=["column_step"])
def keep_rows_kernel(
    kept_ptr,  # [S, K, V]
    kept_stride_slot,
    kept_stride_column,
    kept_lse_ptr,  # float32 [S, K]
    kept_lse_stride,
    logits_ptr,  # [N, V]
    logits_stride,
    lse_ptr,  # float32 [N]
    temperature_ptr,  # float32 [N]
    threshold_ptr,  # float32 [N]
    slot_ptr,  # int64 [N]
    column_ptr,  # int64 [1] or [N]
    column_step,  # 0 where all rows share a column
    vocab_size,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    if (slot >= 0) & (temperature > 0):
        column = tl.load(column_ptr + row * column_step).to(tl.int64)
        entry = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = entry < vocab_size
        logits = tl.load(logits_ptr + row * logits_stride + entry, mask=inside)
        logits = without_filtered(logits, temperature, tl.load(threshold_ptr + row))
        kept_row = kept_ptr + slot * kept_stride_slot + column * kept_stride_column
        tl.store(kept_row + entry, logits, mask=inside)
        if tl.program_id(1) == 0:
            tl.store(kept_lse_ptr + slot * kept_lse_stride + column, tl.load(lse_ptr + row))


def keep_rows(
    kept: torch.Tensor,
    kept_lse: torch.Tensor,
    logits: torch.Tensor,
    lse: torch.Tensor,
    temperature: torch.Tensor,
    thresholds: torch.Tensor,
    slots: torch.Tensor,
    columns: torch.Tensor,
) -> None:
    """Store each row at kept[slot, column] and its logsumexp at kept_lse[slot, column].

    Rows that were not drawn from, of a temperature not above 0, are left out.

    Args:
        kept: [S, K, V], the dtype of logits.
        kept_lse: float32 [S, K].
        logits: [N, V].
        lse: float32 [N].
        temperature: float32 [N].
        thresholds: float32 [N] of ``row_thresholds``; logits below are stored as -inf.
        slots: int64 [N]; a row of slot -1 is not stored.
        columns: int64 [N], or a scalar for all rows.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_logits("kept", kept, 3)
    check_logits("logits", logits, 2)
    rows, vocab_size = logits.shape
    if kept.dtype != logits.dtype or kept.shape[2] != vocab_size:
        raise ValueError(
            f"kept ({kept.shape[2]} entries of {kept.dtype}) does not match logits ({vocab_size} "
            f"entries of {logits.dtype})."
        )
    if kept_lse.shape != kept.shape[:2] or kept_lse.dtype != torch.float32:
        raise ValueError(f"kept_lse must be float32 {list(kept.shape[:2])}.")
    check_vector("lse", lse, rows, (torch.float32,), logits.device)
    for name, vector in (("temperature", temperature), ("thresholds", thresholds)):
        check_vector(name, vector, rows, (torch.float32,), logits.device)
    check_vector("slots", slots, rows, (torch.int64,), logits.device)
    if columns.ndim:
        check_vector("columns", columns, rows, (torch.int64, torch.int32), logits.device)
    keep_rows_kernel[(rows, triton.cdiv(vocab_size, _CHUNK))](
        kept,
        kept.stride(0),
        kept.stride(1),
        kept_lse,
        kept_lse.stride(0),
        logits,
        logits.stride(0),
        lse,
        temperature,
        thresholds,
        slots,
        columns,
        1 if columns.ndim else 0,
        vocab_size,
        CHUNK=_CHUNK,
    )
