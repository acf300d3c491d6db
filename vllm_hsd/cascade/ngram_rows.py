"""An n-gram language model as a level on the device: launches of `kernels.ngram_kernels`.

The probabilities are those of `cascade.ngram_model`, from the order in which suffix lookup keeps
the texts of a store.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from vllm_hsd.cascade.ngram_model import OWN_OCCURRENCES, OWN_WEIGHT, count_pairs
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.cascade.schedule import Draft, Verify
from vllm_hsd.cascade.text_order import END_OF_TEXT, OrderedTexts, order_texts
from vllm_hsd.cascade.text_store import TextStore
from vllm_hsd.kernels import ngram_kernels
from vllm_hsd.kernels.blocks import padded_size

# Places of the request's own text that a program compares, and chunks that are taken at once.
OWN_CHUNK, CHUNKS = 4096, 16
# Occurrences there whose next tokens a program counts among all.
OWNERS = 8
# Vocabulary entries of one program, and tokens that it adds at once.
ROW_CHUNK, LANES = 4096, 2048
# Places that a round of a search looks at: in the store, and among the tokens after a context.
WAYS, TOKEN_WAYS = 128, 32
NUM_WARPS = 8


class Runs(NamedTuple):
    """Where each different sequence of 2, 3, ... tokens begins in an order of texts.

    Attributes:
        starts: int32, the places for each length, ascending, and after them the order's size.
        last: int32, the last token of each of them, ascending after the same tokens.
        offsets: int32 [order + 1], where those of each length begin in `starts`; its size.
    """

    starts: torch.Tensor
    last: torch.Tensor
    offsets: torch.Tensor


class NgramRows:
    """A level without forward passes whose rows have every token, see `program.ProgramLevel`.

    Args:
        texts: those of a store like the ones to be generated, on the device.
        runs: of up to a token more than the longest context.
        single: float32 [V], see `cascade.ngram_model.PairCounts`.

    Attributes:
        text: int32 [max_num_reqs, max_model_len], all committed tokens; its memory must not move.
            To be set before the first forward pass.
    """

    in_target_cache = False

    def __init__(self, texts: OrderedTexts, runs: Runs, single: torch.Tensor) -> None:
        self.texts, self.runs, self.single = texts, runs, single
        self.order = len(runs.offsets) - 1
        self.text: torch.Tensor
        # In memory: numbers that are arguments of a launch have 32 bits.
        self.own_weight = single.new_tensor([OWN_WEIGHT], dtype=torch.float64)

    @classmethod
    def of(cls, store: TextStore, order: int, device: torch.device) -> NgramRows:
        """The n-gram model of a store with contexts of up to `order` tokens."""
        texts = order_texts(store, device)
        single = torch.from_numpy(count_pairs(store).single).float().to(device)
        return cls(texts, runs_of(texts, order), single)

    def forward(self, state: ProposalState, op: Draft | Verify, num_logits: int) -> torch.Tensor:
        rows, vocab_size = state.batch * num_logits, len(self.single)
        device = self.single.device

        def integers(*shape: int) -> torch.Tensor:
            return torch.empty(rows, *shape, dtype=torch.int32, device=device)

        chunks = triton.cdiv(self.text.shape[1] + state.window.shape[1], OWN_CHUNK)
        run, seen = integers(self.order, 2), integers(self.order)
        place, number = integers(chunks, OWN_OCCURRENCES), integers(chunks)
        text = (
            *state.windows,
            state.base,
            state.end,
            state.start[max(op.level - 1, 0)],
            state.slot,
            self.text,
            self.text.stride(0),
        )
        sizes = {
            "ORDER": self.order,
            "DEPTH": padded_size(self.order + 1),
            "OCCURRENCES": OWN_OCCURRENCES,
        }
        of_text = {"VERIFIES": isinstance(op, Verify), "ROWS": num_logits, "CHUNK": OWN_CHUNK}
        ngram_kernels.ngram_search_kernel[(rows, self.order + chunks)](
            run,
            seen,
            place,
            number,
            *self.texts,
            self.runs.starts,
            self.runs.offsets,
            *text,
            len(self.texts.tokens),
            len(self.texts.order),
            WAYS=WAYS,
            num_warps=NUM_WARPS,
            **sizes,
            **of_text,
        )
        token, times = integers(OWN_OCCURRENCES), integers(OWN_OCCURRENCES, self.order)
        ngram_kernels.ngram_own_kernel[(rows, OWN_OCCURRENCES // OWNERS)](
            token,
            times,
            run,
            self.runs.last,
            place,
            number,
            chunks,
            *text,
            OWNERS=OWNERS,
            WAYS=TOKEN_WAYS,
            CHUNKS=CHUNKS,
            num_warps=NUM_WARPS,
            **sizes,
            **of_text,
        )
        logits = torch.empty(rows, vocab_size, dtype=torch.float32, device=device)
        chunk = min(ROW_CHUNK, padded_size(vocab_size))
        ngram_kernels.ngram_rows_kernel[(rows, triton.cdiv(vocab_size, chunk))](
            logits,
            run,
            seen,
            token,
            times,
            self.single,
            self.runs.starts,
            self.runs.last,
            self.own_weight,
            vocab_size,
            LANES=LANES,
            WAYS=TOKEN_WAYS,
            CHUNK=chunk,
            num_warps=NUM_WARPS,
            **sizes,
        )
        return logits


def runs_of(texts: OrderedTexts, order: int) -> Runs:
    """The runs of 2, 3, ..., order + 1 tokens."""
    size, device = len(texts.order), texts.order.device
    is_first = torch.zeros(size, dtype=torch.bool, device=device)
    end = torch.tensor([size], dtype=torch.int64, device=device)
    starts, last = [], []
    for k in range(order + 1):
        at = texts.order.long() + k
        beyond = at >= len(texts.tokens)
        here = texts.tokens[at.clamp(max=len(texts.tokens) - 1)].masked_fill(beyond, END_OF_TEXT)
        is_first |= here != here.roll(1)
        is_first[:1] = True
        if k:
            starts.append(torch.cat((is_first.nonzero()[:, 0], end)))
            last.append(torch.cat((here[is_first], here.new_tensor([END_OF_TEXT]))))
    offsets = torch.tensor([0, *map(len, starts)], dtype=torch.int32).cumsum(0)
    return Runs(torch.cat(starts).int(), torch.cat(last), offsets.int().to(device))
