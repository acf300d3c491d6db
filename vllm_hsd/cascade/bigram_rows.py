"""A bigram model as a level on the device: launches of `kernels.bigram_kernels`.

The probabilities are those of `cascade.bigram`.
"""

from __future__ import annotations

import torch
import triton

from vllm_hsd.cascade.bigram import count_pairs
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.cascade.schedule import Draft, Verify
from vllm_hsd.cascade.text_store import TextStore
from vllm_hsd.kernels.bigram_kernels import bigram_rows_kernel
from vllm_hsd.kernels.blocks import padded_size

# Vocabulary entries of one program, and pairs that it reads at once.
CHUNK, LANES = 4096, 1024


class BigramRows:
    """A level without forward passes whose rows have every token, see `program.ProgramLevel`.

    Args:
        pairs: `cascade.bigram.PairCounts` on the device: starts, following, counts and seen int32,
            logarithms of single float32.
        dtype: of the logits.
    """

    in_target_cache = False

    def __init__(self, pairs: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
        self.pairs, self.dtype = pairs, dtype
        self.vocab_size = len(pairs[-1])

    @classmethod
    def of(cls, store: TextStore, dtype: torch.dtype, device: torch.device) -> BigramRows:
        """The bigram model of a store."""
        *counts, single = vars(count_pairs(store)).values()
        pairs = [torch.from_numpy(each).int() for each in counts]
        pairs.append(torch.from_numpy(single).log().float())
        return cls(tuple(each.to(device) for each in pairs), dtype)

    def forward(self, state: ProposalState, op: Draft | Verify, num_logits: int) -> torch.Tensor:
        rows, device = state.batch * num_logits, self.pairs[0].device
        logits = torch.empty(rows, self.vocab_size, dtype=self.dtype, device=device)
        chunk = min(CHUNK, padded_size(self.vocab_size))
        bigram_rows_kernel[(rows, triton.cdiv(self.vocab_size, chunk))](
            logits,
            *self.pairs,
            *state.windows,
            state.end,
            state.start[max(op.level - 1, 0)],
            state.slot,
            self.vocab_size,
            VERIFIES=isinstance(op, Verify),
            ROWS=num_logits,
            CHUNK=chunk,
            LANES=LANES,
            num_warps=8,
        )
        return logits
