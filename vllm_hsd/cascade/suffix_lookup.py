"""Suffix lookup on the device: launches of `kernels.suffix_kernels`.

As `tools.planner.suffix_level` it drafts the likeliest continuation of the last 1 to `DEPTH` - 1
tokens, from the length of the match that is expected to give most:

- of tokens seen equally often, the one with the lowest number, which tokenizers give to frequent
  ones;
- of the request's own text the `OCCURRENCES` latest of a match are counted, of shared outputs as
  many, and these are shared when their requests end;
- a continuation seen less often than once in `PROBES` occurrences is not drafted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from vllm_hsd.cascade.lookups import search_chunk
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.cascade.shared_outputs import SharedOutputs
from vllm_hsd.cascade.text_order import DEPTH, OCCURRENCES, PROBES, OrderedTexts
from vllm_hsd.kernels import suffix_kernels
from vllm_hsd.kernels.blocks import padded_size

# Occurrences whose next tokens are compared with all others at once.
VOTERS = 16
OWN_WARPS = 8
# Places of the order that a round of the search in a store looks at.
WAYS = 32
# First tokens of a match that are searched before all of them.
HEAD = 8


class Offers(NamedTuple):
    """What each text continues every request with: its own, shared outputs, then the store.

    Attributes:
        token_ids: int32 [S, B, n].
        counts: int32 [S, B], how many of them hold.
        confidence: float64 [S, B, n], see `cascade.level.LookupResult`.
    """

    token_ids: torch.Tensor
    counts: torch.Tensor
    confidence: torch.Tensor


class SuffixLookup:
    """A lookup in the requests' own texts, others' outputs and a store: `program.ProgramLookup`.

    Args:
        texts: the store, on the device; None for none.
        min_acceptance: a draft ends before the token that is less likely to be accepted.
        device: of the requests' texts.
        shared: outputs of other requests; None for none.
    """

    def __init__(
        self,
        texts: OrderedTexts | None,
        min_acceptance: float,
        device: torch.device,
        shared: SharedOutputs | None = None,
    ) -> None:
        self.texts, self.shared = texts, shared
        # In memory: numbers that are arguments of a launch have 32 bits.
        self.least = torch.tensor([min_acceptance], dtype=torch.float64, device=device)

    def __call__(self, state: ProposalState, text: torch.Tensor) -> Offers:
        """Append the continuation of most expected tokens to every text, `requested[0]` at most.

        Args:
            text: int32 [max_num_reqs, max_model_len], all committed tokens; its memory must not
                move.
        """
        sources = 1 + sum(other is not None for other in (self.shared, self.texts))
        batch, n = state.batch, state.lowest_draft

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(sources, *shape, dtype=dtype, device=text.device)

        padding = suffix_kernels.TEXT_ROWS.value
        rows = triton.cdiv(batch, padding) * padding
        expected, counts = empty(rows, DEPTH - 1, dtype=torch.float32), empty(rows, DEPTH - 1)
        tokens = empty(rows, DEPTH - 1, n)
        shares = empty(rows, DEPTH - 1, n, dtype=torch.float32)
        found = expected, counts, tokens, shares
        self._search(state, text, None, *(part[0] for part in found))
        if self.shared is not None:
            self._search(state, text, self.shared.tokens, *(part[1] for part in found))
        if self.texts is not None:
            self._search_store(state, text, self.texts, *(part[-1] for part in found))
        offers = Offers(empty(batch, n), empty(batch), empty(batch, n, dtype=torch.float64))
        suffix_kernels.take_draft_kernel[(batch,)](
            *offers,
            *state.windows,
            state.end,
            state.drafted[0],
            *found,
            self.least,
            SOURCES=sources,
            DEPTH=DEPTH,
            N=n,
            LANES=padded_size(n),
            num_warps=1,
        )
        return offers

    def _search(
        self,
        state: ProposalState,
        text: torch.Tensor,
        shared: torch.Tensor | None,
        *found: torch.Tensor,
    ) -> None:
        """In the requests' own texts, or in one text of all: int32 [width]."""
        batch = state.batch
        width = text.shape[1] if shared is None else len(shared)
        chunk = search_chunk(width, text.device)
        chunks = triton.cdiv(width, chunk)
        matched = torch.empty(batch, width, dtype=torch.uint8, device=text.device)
        most = torch.empty(batch, chunks, dtype=torch.int32, device=text.device)
        shape = batch, DEPTH - 1, OCCURRENCES
        places = torch.empty(*shape, dtype=torch.int32, device=text.device)
        # Of the top level's draft, which begins where the committed text ends.
        committed = state.start[-1]
        suffix_kernels.match_text_kernel[(batch, chunks)](
            matched,
            most,
            *state.windows,
            state.base,
            state.end,
            committed,
            state.requested[0],
            state.slot,
            text,
            text.stride(0),
            shared,
            width,
            DEPTH=DEPTH,
            CHUNK=chunk,
        )
        suffix_kernels.own_votes_kernel[(batch, DEPTH - 1)](
            *found,
            places,
            matched,
            most,
            *state.windows,
            state.base,
            committed,
            state.requested[0],
            state.slot,
            text,
            text.stride(0),
            shared,
            width,
            chunks,
            self.least,
            DEPTH=DEPTH,
            N=state.lowest_draft,
            OCCURRENCES=OCCURRENCES,
            PROBES=PROBES,
            VOTERS=VOTERS,
            CHUNK=chunk,
            CHUNKS=padded_size(chunks),
            num_warps=OWN_WARPS,
            # A product that is rounded before it is added, as on the host.
            enable_fp_fusion=False,
        )

    def _search_store(
        self, state: ProposalState, text: torch.Tensor, texts: OrderedTexts, *found: torch.Tensor
    ) -> None:
        suffix_kernels.store_votes_kernel[(state.batch, DEPTH - 1)](
            *found,
            *texts,
            *state.windows,
            state.base,
            state.end,
            state.requested[0],
            state.slot,
            text,
            text.stride(0),
            len(texts.tokens),
            len(texts.order),
            self.least,
            DEPTH=DEPTH,
            N=state.lowest_draft,
            PROBES=PROBES,
            WAYS=WAYS,
            HEAD=HEAD,
            enable_fp_fusion=False,
        )
