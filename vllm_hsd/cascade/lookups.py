"""Lookups without a state of their own: they append to the texts' windows."""

import torch
import triton

from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.kernels import lookup_kernels
from vllm_hsd.kernels.blocks import padded_size

# Positions of the text that one program compares. On a CPU programs run in turn, and one goes on as
# long as a single position matches: short ones, of which there are not too many.
SEARCH_CHUNK, CPU_CHUNK, CPU_CHUNKS = 2048, 64, 256


def search_chunk(width: int, device: torch.device) -> int:
    """Positions of a text of `width` that one program compares."""
    if device.type != "cpu":
        return SEARCH_CHUNK
    return max(CPU_CHUNK, padded_size(triton.cdiv(width, CPU_CHUNKS)))


def lookup_ngram(state: ProposalState, text: torch.Tensor, *, shortest: int, longest: int) -> None:
    """Continue every text from the first occurrence of its longest repeated suffix.

    The rule of vLLM's prompt lookup (``vllm.v1.spec_decode.ngram_proposer``).

    Args:
        text: int32 [max_num_reqs, max_model_len], all committed tokens; its memory must not move.
        shortest, longest: lengths of the suffix, in tokens.
    """
    chunk = search_chunk(text.shape[1], text.device)
    chunks = triton.cdiv(text.shape[1], chunk)
    best = torch.empty(state.batch, chunks, dtype=torch.int64, device=text.device)
    where = (*state.windows, state.base, state.end)
    lookup_kernels.find_ngram_kernel[(state.batch, chunks)](
        best,
        *where,
        state.requested[0],
        state.slot,
        text,
        text.stride(0),
        LONGEST=longest,
        CHUNK=chunk,
    )
    lookup_kernels.copy_ngram_kernel[(state.batch,)](
        *where,
        state.drafted[0],
        state.requested[0],
        state.slot,
        text,
        text.stride(0),
        best,
        chunks,
        SHORTEST=shortest,
        LANES=padded_size(state.lowest_draft),
        CHUNKS=padded_size(chunks),
        num_warps=1,
    )


def lookup_bigram(state: ProposalState, successor: torch.Tensor) -> None:
    """Continue every text by the successor of its last token, as often as is requested.

    Args:
        successor: int32 [V], -1 where a token has none.
    """
    lookup_kernels.lookup_bigram_kernel[(state.batch,)](
        *state.windows,
        state.end,
        state.drafted[0],
        state.requested[0],
        successor,
        num_warps=1,
    )
