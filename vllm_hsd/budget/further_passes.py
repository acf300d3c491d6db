"""When the model or head next to lookups runs passes after the first one of its draft.

The first pass runs in every step. It reads the text, so that nothing is missing from the cache
later, and gives a token, which is then all that the model drafts. Those after it are for a whole
draft of its own; they are skipped while a lookup's offer is expected to be better for every request
of the batch.

Lossless: which passes run is settled before the first token of the proposal is drawn, by what was
wanted in earlier proposals. That is a function of texts, of the lookups' offers and of past
acceptance at each place of a draft: never of a token that was drawn and is dropped.
"""

from __future__ import annotations

import torch

from vllm_hsd.budget.trials import Trials

# Copies of a count that are under way at once: the oldest one is read.
_COPIES = 3


class FurtherPasses:
    """Decides it step by step, for all requests alike, by counts that are two steps old.

    By then the device is done with them, so that no step waits; ranks, which all count the same,
    read those of the same step. Where no request wants a whole draft there are trials, as in
    `budget.trials`: what is known of the model's later places is as old as its last whole drafts.

    Args:
        wanted: int64 [1] on the device, see `SourcesLookup.wanted`.
    """

    def __init__(self, wanted: torch.Tensor) -> None:
        self.wanted = wanted
        self.copies = torch.zeros(_COPIES, 1, dtype=wanted.dtype, pin_memory=wanted.is_cuda)
        self.arrived = [torch.cuda.Event() for _ in range(_COPIES if wanted.is_cuda else 0)]  # type: ignore[no-untyped-call]
        self.step = self.seen = 0
        self.trials = Trials(1)

    def due(self) -> bool:
        """Whether they run in the proposal that begins now; to be called once for each."""
        now, oldest = self.step % _COPIES, (self.step + 1) % _COPIES
        self.step += 1
        self.copies[now].copy_(self.wanted, non_blocking=True)
        if self.arrived:
            self.arrived[now].record()
            self.arrived[oldest].synchronize()
        before, self.seen = self.seen, int(self.copies[oldest])
        if self.seen > before:
            self.trials.pays(0)
            return True
        return self.trials.due(0)
