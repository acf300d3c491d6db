"""What the models of a cascade compute for a batch: logits, probabilities, greedy tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_hsd.cascade.counters import Count, LevelCounts
from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.rules.chain import argmax_rows
from vllm_hsd.rules.residual import ROW_SUM_TOLERANCE
from vllm_hsd.tools.lookup_level import UNLIMITED
from vllm_hsd.tools.reference.batch import DraftBatch, Level
from vllm_hsd.tools.reference.stopping import entropy_nats

logger = logging.getLogger(__name__)


@dataclass
class Forward:
    """What a level's model says about some positions.

    Attributes:
        logits: [R, V].
        probs: [R, V] that the level draws from and verifies by; None of greedy requests.
        entropy: [R] float64 nats, NaN where the level does not stop by it.
        uncertain: [R] bool, it exceeds the request's threshold.
    """

    logits: torch.Tensor
    probs: torch.Tensor | None
    entropy: np.ndarray
    uncertain: np.ndarray


class LevelModels:
    """The models of a cascade's levels.

    Args:
        models: one per level, None at a lowest level of lookups alone.
        options: one per level.
        counts: of their forward passes.

    Attributes:
        context_lengths: longest text of each level in tokens.
    """

    def __init__(
        self, models: Sequence[Level | None], options: Sequence[LevelOptions], counts: LevelCounts
    ) -> None:
        self.models, self.options, self.counts = models, options, counts
        self.context_lengths = [
            UNLIMITED if model is None else model.context_length for model in models
        ]
        self.warned: set[int] = set()

    def can_draft(self, batch: DraftBatch, level: int, slots: np.ndarray) -> np.ndarray:
        """[n] bool, the requests whose text fits the level."""
        able: np.ndarray = batch.end[slots] <= self.context_lengths[level]
        return able

    def forward(
        self, batch: DraftBatch, level: int, slots: np.ndarray, num_logits: np.ndarray
    ) -> Forward:
        """Run the level on all that its cache lacks of `slots`, which is then valid to the end.

        Args:
            slots: [n] int64.
            num_logits: [n] int64, how many of the last positions are wanted.

        Returns:
            sum(num_logits) rows, request after request.
        """
        start, model = batch.cached[level, slots], self.models[level]
        counts = batch.end[slots] - start
        assert model is not None
        logits = model.forward(batch.tokens, batch.rows[slots], start, counts, num_logits)
        assert logits is not None
        self.counts.rows[level, Count.forwards] += 1
        batch.cached[level, slots] = batch.end[slots]
        owners = np.repeat(slots, num_logits)
        probs = None if batch.greedy else self._probs(batch, level, logits, owners)
        entropy, uncertain = np.full(len(owners), np.nan), np.zeros(len(owners), dtype=bool)
        if self.options[level].stopping == "entropy":
            entropy = entropy_nats(logits)
            uncertain = batch.thresholds.exceeded(level, owners, entropy)
        return Forward(logits, probs, entropy, uncertain)

    def _probs(
        self, batch: DraftBatch, level: int, logits: torch.Tensor, slots: np.ndarray
    ) -> torch.Tensor:
        """[n, V] probabilities of the level; uniform where its logits are not finite."""
        probs = batch.probs(logits, slots, level)
        valid = (probs.sum(-1) - 1).abs() < ROW_SUM_TOLERANCE
        if not valid.all():
            self._warn_unless(level, False)
            probs[~valid] = 1 / probs.shape[1]
        return probs

    def argmax(self, logits: torch.Tensor, level: int) -> np.ndarray:
        """[n] int64 greedy tokens."""
        best, highest = argmax_rows(logits)
        self._warn_unless(level, bool(np.isfinite(highest).all()))
        return best

    def _warn_unless(self, level: int, finite: bool) -> None:
        """One warning per level: any token that it drafts then is still verified losslessly."""
        if not finite and level not in self.warned:
            self.warned.add(level)
            logger.warning(
                "levels[%d] gives logits that are not finite; its drafts are arbitrary there, "
                "which costs acceptance: check its weights and dtype.",
                level,
            )
