"""What the models of a cascade compute for a batch: logits, probabilities, greedy tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_hsd.cascade.counters import Count, Counters
from vllm_hsd.cascade.level import UNLIMITED, DraftBatch, Level, LevelOptions
from vllm_hsd.cascade.stopping import entropy_nats
from vllm_hsd.rules.chain import argmax_rows
from vllm_hsd.rules.residual import ROW_SUM_TOLERANCE

logger = logging.getLogger(__name__)


@dataclass
class Forward:
    """What a level's model says about some positions.

    Attributes:
        logits: [R, V].
        probs: [R, V] that the level draws from and verifies by; None where no request is
            drawn from them.
        entropy: [R] float64 nats, NaN where the level does not stop by it.
        uncertain: [R] bool, it exceeds the request's threshold.
        computed: tokens that the model was fed.
    """

    logits: torch.Tensor
    probs: torch.Tensor | None
    entropy: np.ndarray
    uncertain: np.ndarray
    computed: int

    def of(self, rows: np.ndarray) -> Forward:
        """Some of the rows, [k] int64; `computed` is left as it is."""
        index = torch.from_numpy(rows).to(self.logits.device)
        return replace(
            self,
            logits=self.logits[index],
            probs=None if self.probs is None else self.probs[index],
            entropy=self.entropy[rows],
            uncertain=self.uncertain[rows],
        )


class LevelModels:
    """The models of a cascade's levels.

    Args:
        models: one per level, None at a lowest level of lookups alone.
        options: one per level.
        counters: counts their forward passes.

    Attributes:
        context_lengths: longest text of each level in tokens.
    """

    def __init__(
        self, models: Sequence[Level | None], options: Sequence[LevelOptions], counters: Counters
    ) -> None:
        self.models, self.options, self.counters = models, options, counters
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
            batch: the requests.
            level: the level.
            slots: [n] int64.
            num_logits: [n] int64, how many of the last positions are wanted.

        Returns:
            sum(num_logits) rows, request after request.
        """
        counts = batch.end[slots] - batch.cached[level, slots]
        logits = self._timed(batch, level, slots, counts, num_logits)
        assert logits is not None
        batch.cached[level, slots] = batch.end[slots]
        owners = np.repeat(slots, num_logits)
        drawn = batch.is_drawn(slots).any()
        probs = self._probs(batch, level, logits, owners) if drawn else None
        entropy, uncertain = self._confidence(batch, level, logits, owners)
        return Forward(logits, probs, entropy, uncertain, int(counts.sum()))

    def ingest(self, batch: DraftBatch, slots: np.ndarray, end: np.ndarray) -> None:
        """Bring every level's cache of `slots` up to the positions `end`, without drafting.

        Args:
            batch: the step's requests.
            slots: [n] int64.
            end: [n] int64, or [levels, n].
        """
        end = np.broadcast_to(end, (len(self.models), len(slots)))
        for k, model in enumerate(self.models):
            if model is None or not model.keeps_cache:
                continue
            cached = batch.cached[k]
            upto = np.minimum(end[k], self.context_lengths[k])
            uncached = cached[slots] < upto
            if uncached.any():
                filled, upto = slots[uncached], upto[uncached]
                none = np.zeros(len(filled), dtype=np.int64)
                self._timed(batch, k, filled, upto - cached[filled], none)
                cached[filled] = upto

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

    def choose(
        self,
        batch: DraftBatch,
        level: int,
        logits: torch.Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
    ) -> np.ndarray:
        """[n] int64 tokens of requests that are not drawn from probabilities."""
        if batch.greedy:
            return self.argmax(logits, level)
        assert batch.choose is not None
        return batch.choose(logits, slots, positions, level)

    def argmax(self, logits: torch.Tensor, level: int) -> np.ndarray:
        """[n] int64 greedy tokens."""
        best, highest = argmax_rows(logits)
        self._warn_unless(level, bool(np.isfinite(highest).all()))
        return best

    def _confidence(
        self, batch: DraftBatch, level: int, logits: torch.Tensor, slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Entropies of rows [n] and whether each exceeds its request's threshold."""
        if self.options[level].stopping != "entropy":
            return np.full(len(slots), np.nan), np.zeros(len(slots), dtype=bool)
        entropy = entropy_nats(logits)
        return entropy, batch.thresholds.exceeded(level, slots, entropy)

    def _warn_unless(self, level: int, finite: bool) -> None:
        """One warning per level: any token that it drafts then is still verified losslessly."""
        if not finite and level not in self.warned:
            self.warned.add(level)
            logger.warning(
                "levels[%d] gives logits that are not finite; its drafts are arbitrary there, "
                "which costs acceptance: check its weights and dtype.",
                level,
            )

    def _timed(
        self,
        batch: DraftBatch,
        level: int,
        slots: np.ndarray,
        counts: np.ndarray,
        num_logits: np.ndarray,
    ) -> torch.Tensor | None:
        began = time.perf_counter_ns()
        model = self.models[level]
        assert model is not None
        logits = model.forward(
            batch.tokens, batch.rows[slots], batch.cached[level, slots], counts, num_logits
        )
        self.counters.rows[level, Count.forwards] += 1
        self.counters.rows[level, Count.forward_ns] += time.perf_counter_ns() - began
        return logits


def highest_probability(logits: torch.Tensor) -> np.ndarray:
    """[n] float64, of the softmax of each row [n, V]; 0 where the row is not finite."""
    peaks = (logits.amax(-1) - logits.logsumexp(-1)).exp()
    found: np.ndarray = np.nan_to_num(peaks.double().cpu().numpy())
    return found
