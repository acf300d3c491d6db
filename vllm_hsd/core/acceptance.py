"""Acceptance by level, draft position and request, learned from past verifications."""

from __future__ import annotations

from typing import Any

import numpy as np

# Drafts after which an observation of the shared curve, or of a request, weighs half.
_SHARED_HALF_LIFE, _OWN_HALF_LIFE = 1000.0, 40.0
# Steps without a draft that halve what is known of a request alone: it is tried again.
_IDLE_HALF_LIFE = 512.0
# Tokens verified, and rejected among them, that the estimates start from.
_PRIOR_VERIFIED, _PRIOR_REJECTED = 2.0, 0.6
# Verified tokens of all positions that a position's own rate starts from.
_POOLED = 8.0
# Verified tokens, as the shared curve says, with which every request starts at every position.
_OWN_PRIOR = 4.0
# Drafts that a measurement made before serving counts for.
_SEED_DRAFTS = 16.0


class AcceptanceEstimates:
    """How likely drafted tokens are accepted.

    Per level a curve that all requests share: P(token j is rejected, given that the tokens before
    it were accepted). Per request the same from its own drafts, with the shared curve as its prior.
    Both are exponentially forgotten; the memory is bounded.

    Args:
        num_levels: drafting levels.
        num_slots: requests at the same time.
        max_length: longest draft in tokens.
    """

    def __init__(self, num_levels: int, num_slots: int, max_length: int) -> None:
        self.max_length = max_length
        self.verified = np.zeros((num_levels, max_length))
        self.rejected = np.zeros((num_levels, max_length))
        self.drafts = np.full(num_levels, 1.0)
        self.filled = np.full(num_levels, 1.0)
        # Rejected and verified tokens of each request.
        self.own = np.zeros((2, num_levels, num_slots, max_length))
        # Per level what `hazard` gave, None where something was learned since.
        self._hazard: list[np.ndarray | None] = [None] * num_levels
        # How often a slot's request has changed.
        self.arrivals = 0

    def forget(self, slot: int) -> None:
        """See `core.levels.PerRequest`."""
        self.own[:, :, slot] = 0
        self.arrivals += 1

    def set_aside(self, slot: int) -> Any:
        """See `core.levels.PerRequest`."""
        return self.own[:, :, slot].copy()

    def restore(self, slot: int, kept: Any) -> None:
        """See `core.levels.PerRequest`."""
        self.own[:, :, slot] = kept
        self.arrivals += 1

    def seed(self, level: int, survival: np.ndarray, filled: float) -> None:
        """Start from what became of drafts before, which weigh as `_SEED_DRAFTS` drafts.

        Args:
            survival: [n + 1] float64, P(at least t tokens were accepted) of drafts with tokens.
            filled: share of drafts with tokens.
        """
        alive = _SEED_DRAFTS * survival[: self.max_length + 1]
        self.verified[level, : len(alive) - 1] = alive[:-1]
        self.rejected[level, : len(alive) - 1] = alive[:-1] - alive[1:]
        self.drafts[level], self.filled[level] = _SEED_DRAFTS, _SEED_DRAFTS * filled
        self._hazard[level] = None

    def observe(
        self, level: int, slots: np.ndarray, lengths: np.ndarray, accepted: np.ndarray
    ) -> None:
        """Take in one verified draft of `level` per request.

        Args:
            slots: [n] int64.
            lengths: [n] int64 tokens that were verified; those of 0 say nothing.
            accepted: [n] int64, at most `lengths`.
        """
        some = lengths > 0
        if not some.all():
            slots, lengths, accepted = slots[some], lengths[some], accepted[some]
        if not len(slots):
            return
        self._hazard[level] = None
        # [2, n, max_length] tokens rejected and verified now.
        now = np.zeros((2, len(slots), self.max_length))
        failed = accepted < lengths
        now[0, failed, accepted[failed]] = 1
        now[1] = np.arange(self.max_length) < np.minimum(accepted + 1, lengths)[:, None]
        kept = self.own[:, level, slots]
        kept *= 0.5 ** (1 / _OWN_HALF_LIFE)
        self.own[:, level, slots] = kept + now
        rejected, reached = now.sum(1)
        # What is not met for long stays as it was.
        keep = np.where(reached > 0, 0.5 ** (len(slots) / _SHARED_HALF_LIFE), 1.0)
        self.rejected[level] = keep * self.rejected[level] + rejected
        self.verified[level] = keep * self.verified[level] + reached

    def count(self, level: int, requested: int, filled: int) -> None:
        """Take in that `filled` of `requested` drafts of `level` hold any token."""
        keep = 0.5 ** (requested / _SHARED_HALF_LIFE)
        self.drafts[level] = keep * self.drafts[level] + requested
        self.filled[level] = keep * self.filled[level] + filled

    def rest(self, levels: list[int], slots: np.ndarray, steps: int = 1) -> None:
        """Note that `levels` drafted nothing for the requests in `slots` for so many steps."""
        if not levels or not len(slots):
            return
        self.own[:, np.array(levels)[:, None], slots] *= 0.5 ** (steps / _IDLE_HALF_LIFE)

    def fill(self, level: int) -> float:
        """Share of drafts requested of `level` that hold any token: a lookup often finds none."""
        return float(self.filled[level] / self.drafts[level])

    def hazard(self, level: int) -> np.ndarray:
        """[max_length] probability that token j is rejected where those before it were not."""
        known = self._hazard[level]
        if known is None:
            verified, rejected = self.verified[level], self.rejected[level]
            pooled = (rejected.sum() + _PRIOR_REJECTED) / (verified.sum() + _PRIOR_VERIFIED)
            known = (rejected + _POOLED * pooled) / (verified + _POOLED)
            self._hazard[level] = known
        return known

    def survival(self, level: int, slots: np.ndarray) -> np.ndarray:
        """[n, max_length] probability that the first j + 1 drafted tokens are all accepted."""
        rejected, verified = self.own[:, level, slots]
        rejected = rejected + _OWN_PRIOR * self.hazard(level)
        hazard = np.minimum(rejected / (verified + _OWN_PRIOR), 0.999)
        return np.cumprod(1 - hazard, axis=1)
