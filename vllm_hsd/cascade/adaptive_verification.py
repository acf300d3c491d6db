"""Confidences of drafts, by which vLLM's adaptive verification chooses the tokens of all requests.

With `enable_adaptive_verification` vLLM's manager multiplies the confidences of a draft up to each
place and admits the best places of the batch; a draft ends before its first one that is left out.
That is lossless where it is settled before a token is drawn whether it is admitted: a confidence
goes by the row that the token is drawn from, by the text and by past acceptance, never by the token
itself, and products fall strictly along a draft, so that no later place decides by a tie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# In float32 the products still fall after as many places as a draft has at most.
MOST = 1.0 - 2.0**-12
_SMALLEST_PRODUCT = 2.0**-126


class BoundedConfidence:
    """vLLM's estimator of acceptance under our verifier, for drafters of vLLM's.

    The estimator learns the acceptance of a place from the log-odds of its row's likeliest token.

    Args:
        estimator: vLLM's.
    """

    def __init__(self, estimator: Any) -> None:
        self.estimator = estimator
        self.least = _SMALLEST_PRODUCT ** (1 / estimator.num_speculative_steps)

    def predict(
        self,
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        draft_step: Any,
        confidence_probs: torch.Tensor,
        temperature: torch.Tensor,
    ) -> None:
        """As vLLM's, which calls it for every row that is drawn from."""
        self.estimator.predict(logits, idx_mapping, draft_step, confidence_probs, temperature)
        confidence_probs.clamp_(self.least, MOST)

    def step(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """As vLLM's, which calls it with the verdict on the last drafts."""
        self.estimator.step(idx_mapping, num_sampled, num_rejected)


class DraftConfidence(BoundedConfidence):
    """Of drafters of ours, whose drafts have lengths of their own.

    A place whose row is not measured, as a lookup's, has the acceptance that was learned of places
    as far from the start of a draft; one after the end of its draft has none.

    Args:
        estimator: vLLM's; its last slot is nobody's, and -1 its index.
        lengths: int64 [n] slots -> int32 [n], tokens of the last draft of each.

    Attributes:
        places: int64 [K], 0 .. K - 1.
        temperature: float32 [slots], of the rows that are measured.
    """

    def __init__(self, estimator: Any, lengths: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(estimator)
        self.lengths = lengths
        slots, longest = estimator.features.shape
        device = estimator.features.device
        self.places = torch.arange(longest, device=device)
        self.temperature = torch.zeros(slots, dtype=torch.float32, device=device)

    def step(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """As vLLM's; what fills a draft up to the longest was not rejected."""
        accepted = (num_sampled - 1).clamp(min=0)
        verified = torch.minimum(accepted + num_rejected, self.lengths(idx_mapping.long()))
        rejected = (verified - accepted).clamp(min=0).to(num_rejected.dtype)
        self.estimator.step(idx_mapping, num_sampled, rejected)

    def begin(self, slots: torch.Tensor, temperature: torch.Tensor) -> None:
        """Before proposals of these slots: nothing is measured yet.

        Args:
            slots: int64 [n], -1 for no proposal.
            temperature: float32 [max_num_reqs] of the level that hands drafts to the target.
        """
        self.temperature[: len(temperature)] = temperature
        self._forget(slots, torch.ones_like(slots, dtype=torch.bool))

    def measure(self, logits: torch.Tensor, slots: torch.Tensor, places: torch.Tensor) -> None:
        """Take in rows that draft tokens are drawn from.

        Args:
            logits: [n, V], contiguous rows.
            slots: int32 [n], -1 for a row that no token is drawn from.
            places: int64 [n] or a scalar, of the tokens in their drafts.
        """
        nowhere = torch.empty(
            len(logits), len(self.places), dtype=torch.float32, device=logits.device
        )
        self.estimator.predict(logits, slots, places, nowhere, self.temperature)

    def measure_verified(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        origin: torch.Tensor,
        emitted: torch.Tensor,
    ) -> None:
        """Take in the rows of a level's verification, whose tokens it passes on.

        Args:
            logits: [B * r, V].
            slots: int32 [B].
            origin: int32 [B], place of the first token; -1 where nothing is passed on.
            emitted: int32 [B], tokens that are passed on.
        """
        rows = torch.arange(len(logits) // len(slots), device=slots.device)
        drawn = (origin[:, None] >= 0) & (rows < emitted[:, None])
        self.measure(
            logits,
            torch.where(drawn, slots[:, None], -1).flatten(),
            (origin[:, None] + rows).flatten(),
        )

    def publish(
        self, probs: torch.Tensor, slots: torch.Tensor, drawn: torch.Tensor | None = None
    ) -> None:
        """Write the confidences of the drafts of a batch where vLLM reads them.

        Args:
            probs: float32 [max_num_reqs, K], of which the first n rows are written.
            slots: int64 [n], -1 for no proposal.
            drawn: float32 [slots], 0 where a lookup's tokens took the place of those that were
                drawn; None where there are none such.
        """
        if drawn is not None:
            self._forget(slots, drawn[slots] == 0)
        found = self.estimator.predictions[slots].clamp(self.least, MOST)
        ended = self.places >= self.lengths(slots)[:, None]
        probs[: len(slots)] = found.masked_fill(ended, 0.0)

    def _forget(self, slots: torch.Tensor, where: torch.Tensor) -> None:
        """Let the places of some of the slots, int64 [n], be unmeasured."""
        nobody = len(self.estimator.features) - 1
        slots = slots.where(where, nobody)
        self.estimator.features.index_fill_(0, slots, 0.0)
        self.estimator.predictions[slots] = self.estimator.intercepts.sigmoid()
