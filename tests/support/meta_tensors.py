"""Tensors without values, of which launches are made: see `kernel_launches`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_hsd.kernels.filter_rows import Filters

# Requests of a launch; the number changes nothing but the grid.
BATCH = 3


def targets(rows: int, vocab_size: int, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, bool]]:
    """A target's logits [rows, V], and whether they are the model's own.

    Of the model; of a padded head; with all sampling parameters applied.
    """
    padded = -(-vocab_size // 64) * 64
    for own, width in ((dtype, vocab_size), (dtype, padded), (None, padded)):
        logits = empty(rows, width, dtype=own or torch.float32)
        yield logits[:, :vocab_size], own is not None


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def longs(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int64)


def filters(requests: int) -> Filters:
    return Filters(empty(requests), floats(requests), floats(requests))


def floats(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.float32)
