"""Predicted texts on the device: what follows the place where the answer stands.

The place is the end of the longest match, of at most `LONGEST` tokens, between the prediction and
the end of the answer. Of equally long ones it is the one at which an answer that went on as
predicted would stand, then the nearest one after the last place, then the nearest before it. An
answer whose last token the prediction does not have drafts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from vllm_hsd.cascade.lookups import search_chunk
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.cascade.suffix_lookup import Offers
from vllm_hsd.kernels import prediction_kernels
from vllm_hsd.kernels.blocks import padded_size

LONGEST = 32
# A match of m tokens is taken to be right with m / (m + DOUBT), between the bins of `acceptance`.
DOUBT = 0.8


class PredictionLookup:
    """A lookup in the predictions of the requests: `program.ProgramLookup`.

    Args:
        slots: requests at the same time.
        width: most tokens of a prediction.
        device: of the requests' texts.

    Attributes:
        tokens: int32 [slots, width], by request slot; their memory does not move.
        facts: int32 [slots, 4], tokens of the prediction and of the prompt, the last place in the
            prediction and the tokens of the text when it was found.
    """

    def __init__(self, slots: int, width: int, device: torch.device) -> None:
        self.tokens = torch.zeros(slots, width, dtype=torch.int32, device=device)
        self.facts = torch.zeros(slots, 4, dtype=torch.int32, device=device)
        # In memory: numbers that are arguments of a launch have 32 bits.
        self.doubt = torch.tensor([DOUBT], dtype=torch.float64, device=device)

    def add_request(self, slot: int, prompt_tokens: int, prediction: Sequence[int]) -> None:
        """Take over a request's prediction, which may be empty; what is longer than fits is cut."""
        prediction = prediction[: self.tokens.shape[1]]
        count = len(prediction)
        facts = [count, prompt_tokens, 0, prompt_tokens]
        pinned = self.tokens.is_cuda
        new = torch.tensor([*facts, *prediction], dtype=torch.int32, pin_memory=pinned)
        new = new.to(self.tokens.device, non_blocking=True)
        self.facts[slot] = new[: len(facts)]
        self.tokens[slot, :count] = new[len(facts) :]

    def __call__(self, state: ProposalState, text: torch.Tensor) -> Offers:
        """Append what is predicted to every text, `requested[0]` tokens at most.

        Args:
            text: int32 [max_num_reqs, max_model_len], all committed tokens; its memory must not
                move.
        """
        batch, n, width = state.batch, state.lowest_draft, self.tokens.shape[1]
        chunk = search_chunk(width, text.device)
        chunks = triton.cdiv(width, chunk)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=text.device)

        best = empty(batch, chunks, dtype=torch.int64)
        predicted = self.tokens, width, self.facts
        prediction_kernels.find_place_kernel[(batch, chunks)](
            best,
            *state.windows,
            state.base,
            state.end,
            state.requested[0],
            state.slot,
            text,
            text.stride(0),
            *predicted,
            LONGEST=LONGEST,
            CHUNK=chunk,
        )
        offers = Offers(
            empty(1, batch, n), empty(1, batch), empty(1, batch, n, dtype=torch.float64)
        )
        prediction_kernels.copy_predicted_kernel[(batch,)](
            *offers,
            *state.windows,
            state.base,
            state.end,
            # Of the top level's draft, which begins where the committed text ends.
            state.start[-1],
            state.drafted[0],
            state.requested[0],
            state.slot,
            *predicted,
            best,
            chunks,
            self.doubt,
            N=n,
            LANES=padded_size(n),
            CHUNKS=padded_size(chunks),
            num_warps=1,
        )
        return offers
