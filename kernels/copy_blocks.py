"""Copies of KV-cache blocks between a request's chain and its branches, one launch for all layers.

Before the target's pass every branch gets a copy of the block that holds its root and text before
it; after the verification the blocks of the branch that won are copied back. The places of blocks
come from the rows' block tables on the device (``vllm_hsd.cascade.row_layout`` says which).
"""

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_hsd.kernels.blocks import check_vector

# Bytes that a program copies: whole words of 8, read 16 at a time.
_CHUNK, _WORD, _ALIGNED = 16384, 8, 16


class BranchRows(NamedTuple):
    """Rows of a step on the device.

    Attributes:
        request: int32 [N], of each row.
        branch: int32 [N], its number in its request; 0 is the chain.
        chain: int32 [N], the row of the chain in its request; -1 for a row without own blocks.
        base: int64 [N], position of its root.
    """

    request: torch.Tensor
    branch: torch.Tensor
    chain: torch.Tensor
    base: torch.Tensor


class CacheBlocks(NamedTuple):
    """Where layers have the blocks of a KV-cache group.

    Attributes:
        pieces: int64 [P, 3], of each piece of a block that is contiguous in a layer: the address
            of block 0's, bytes from a block's to the next one's, bytes.
        longest: bytes of the longest piece.
    """

    pieces: torch.Tensor
    longest: int

    @classmethod
    def of(cls, caches: Iterable[torch.Tensor]) -> "CacheBlocks":
        """The pieces of caches [blocks, ...] in any order of strides, which must not move.

        Raises:
            ValueError: a block is not made of pieces of whole 16 bytes.
        """
        pieces, device = [], torch.device("cpu")
        for cache in caches:
            device, size = cache.device, cache.element_size()
            inner = sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True))
            run = 1
            while inner and (inner[0][0] == run or inner[0][1] == 1):
                run *= inner.pop(0)[1]
            each = (range(0, stride * count, stride) for stride, count in inner)
            starts = [cache.data_ptr() + sum(at) * size for at in itertools.product(*each)]
            pieces += [(start, cache.stride(0) * size, run * size) for start in starts]
        if not pieces or math.gcd(*itertools.chain(*pieces)) % _ALIGNED:
            raise ValueError("caches must have blocks of contiguous pieces of whole 16 bytes.")
        table = torch.tensor(pieces, dtype=torch.int64, device=device)
        return cls(table, max(size for *_, size in pieces))


@triton.jit
def copy_blocks_kernel(
    piece_ptr,  # int64 [P, 3]
    table_ptr,  # int32 [N, width]
    table_stride,
    request_ptr,  # int32 [N]
    branch_ptr,  # int32 [N]
    chain_ptr,  # int32 [N]
    base_ptr,  # int64 [N]
    winner_ptr,  # int32 [B], with BACK
    emitted_ptr,  # int32 [B], with BACK
    block_size,
    chunks,
    BACK: tl.constexpr,
    WORDS: tl.constexpr,  # of a chunk
):
    piece_ptr += (tl.program_id(0) // chunks) * 3
    row = tl.program_id(1)
    branch = tl.load(branch_ptr + row)
    chain = tl.load(chain_ptr + row)
    base = tl.load(base_ptr + row)
    index = base // block_size
    copied = (branch > 0) & (chain >= 0)
    if BACK:
        request = tl.load(request_ptr + row)
        kept = tl.load(emitted_ptr + request) - 1
        # The block after the root: one that the root ends is the chain's, and may be shared.
        index = (base + 1) // block_size + tl.program_id(2)
        copied = copied & (tl.load(winner_ptr + request) == branch)
        copied = copied & (kept > 0) & (index <= (base + kept) // block_size)
    if copied:
        own = tl.load(table_ptr + row.to(tl.int64) * table_stride + index).to(tl.int64)
        main = tl.load(table_ptr + chain.to(tl.int64) * table_stride + index).to(tl.int64)
        source, target = main, own
        if BACK:
            source, target = own, main
        address = tl.load(piece_ptr)
        stride = tl.load(piece_ptr + 1)
        word = (tl.program_id(0) % chunks) * WORDS + tl.arange(0, WORDS)
        # Of whole 16 bytes, as `CacheBlocks` says, which one thread moves at a time.
        inside = word < tl.multiple_of(tl.load(piece_ptr + 2) // 8, 2)
        from_ptr = (address + source * stride).to(tl.pointer_type(tl.int64))
        to_ptr = (address + target * stride).to(tl.pointer_type(tl.int64))
        words = tl.load(tl.multiple_of(from_ptr, 16) + word, mask=inside)
        tl.store(tl.multiple_of(to_ptr, 16) + word, words, mask=inside)


def copy_to_branches(
    cache: CacheBlocks, rows: BranchRows, tables: torch.Tensor, block_size: int
) -> None:
    """Give every branch the block of its chain that holds the root: the text before the root in it,
    and what a drafter has computed of the root, which the target's pass does not write.

    Args:
        cache: of a KV-cache group.
        rows: of the step.
        tables: int32 [N, width], block ids of every row in this group.
        block_size: tokens of a block.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    _copy(cache, rows, tables, block_size, 1, None)


def copy_from_winners(
    cache: CacheBlocks,
    rows: BranchRows,
    tables: torch.Tensor,
    block_size: int,
    winner: torch.Tensor,
    num_emitted: torch.Tensor,
    max_tokens: int,
) -> None:
    """Copy what a branch that won has computed after its root to where the text is.

    Args:
        cache, rows, tables, block_size: as in `copy_to_branches`.
        winner: int32 [B], the branch that each request followed, 0 for the chain.
        num_emitted: int32 [B] tokens; all but the last one of them are the branch's.
        max_tokens: most tokens of a branch.

    Raises:
        ValueError: as in `copy_to_branches`.
    """
    blocks = (max_tokens - 1) // block_size + 2
    _copy(cache, rows, tables, block_size, blocks, (winner, num_emitted))


def _copy(
    cache: CacheBlocks,
    rows: BranchRows,
    tables: torch.Tensor,
    block_size: int,
    blocks: int,
    followed: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    count, device = len(rows.base), tables.device
    for name, values in rows._asdict().items():
        dtype = torch.int64 if name == "base" else torch.int32
        check_vector(name, values, count, (dtype,), device)
    for name, values in zip(("winner", "num_emitted"), followed or (), strict=False):
        check_vector(name, values, None, (torch.int32,), device)
    if tables.shape[0] < count or tables.dtype != torch.int32 or tables.stride(1) != 1:
        raise ValueError(f"tables must be int32 [>= {count}, width] with contiguous rows.")
    if not count:
        return
    chunks = triton.cdiv(cache.longest, _CHUNK)
    copy_blocks_kernel[(len(cache.pieces) * chunks, count, blocks)](
        cache.pieces,
        tables,
        tables.stride(0),
        *rows,
        *(followed or (rows.request, rows.request)),
        block_size,
        chunks,
        BACK=followed is not None,
        WORDS=min(_CHUNK, triton.next_power_of_2(cache.longest)) // _WORD,
    )
