"""What the sources of drafts offer in a round, with how sure they are of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_hsd.core.levels import Lookup

# Values of a source's own estimate that are told apart.
STEPS = 8


@dataclass
class Offers:
    """What S sources offer n requests.

    Attributes:
        token_ids: [S, n, width] int64.
        counts: [S, n] int64.
        estimates: [S, n, width] float64, the source's own acceptance probability of each token
            after the ones before.
        steps: [S, n, width] int64, the estimates as one of STEPS.
        corrected: [S, n, width] float64, see `SourceChoice.corrected`; None before it is asked for.
    """

    token_ids: np.ndarray
    counts: np.ndarray
    estimates: np.ndarray
    steps: np.ndarray = field(init=False)
    corrected: np.ndarray | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.steps = step_of(self.estimates)

    def of_requests(self, own: np.ndarray) -> Offers:
        """What they offer the requests in `own`, [n] bool."""
        return Offers(self.token_ids[:, own], self.counts[:, own], self.estimates[:, own])

    @classmethod
    def of(cls, found: Sequence[Lookup]) -> Offers:
        """What lookups found for the same requests, at least one of them, all of one width."""
        confidence = _stacked([lookup.confidence for lookup in found])
        estimates = confidence.copy()
        before, after = confidence[..., :-1], confidence[..., 1:]
        np.divide(after, before, out=estimates[..., 1:], where=before > 0)
        return cls(
            _stacked([lookup.token_ids for lookup in found]),
            _stacked([lookup.counts for lookup in found]),
            estimates,
        )


def step_of(estimates: np.ndarray) -> np.ndarray:
    """int64 of the same shape, probabilities as one of STEPS."""
    return np.minimum((estimates * STEPS).astype(np.int64), STEPS - 1)


def _stacked(arrays: list[np.ndarray]) -> np.ndarray:
    return np.stack(arrays) if len(arrays) > 1 else arrays[0][None]
