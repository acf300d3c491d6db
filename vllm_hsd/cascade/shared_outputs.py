"""Outputs of earlier requests on the device, in which suffix lookups look."""

from __future__ import annotations

import torch

from vllm_hsd.cascade.text_order import END_OF_TEXT
from vllm_hsd.kernels.share_outputs import share_outputs_kernel

# Tokens that are copied at once.
COPY_CHUNK = 1024


class SharedOutputs:
    """A ring of the outputs of requests that have ended.

    Args:
        limit: most tokens, an end after each output included.
        device: of the requests' texts.

    Attributes:
        tokens: int32 [limit], `END_OF_TEXT` after each output; its memory does not move.
        next: int64 [1], where the next one goes.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.tokens = torch.full((limit,), END_OF_TEXT, dtype=torch.int32, device=device)
        self.next = torch.zeros(1, dtype=torch.int64, device=device)

    def add(
        self, slots: torch.Tensor, begins: torch.Tensor, lengths: torch.Tensor, text: torch.Tensor
    ) -> None:
        """Keep what follows the prompts of some requests.

        Args:
            slots, begins: int32 [n], the requests' slots and the lengths of their prompts.
            lengths: int32 [max_num_reqs], of the texts.
            text: int32 [max_num_reqs, max_model_len].
        """
        share_outputs_kernel[(1,)](
            self.tokens,
            self.next,
            slots,
            begins,
            lengths,
            text,
            text.stride(0),
            len(self.tokens),
            len(slots),
            CHUNK=COPY_CHUNK,
        )
