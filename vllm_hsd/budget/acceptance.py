"""How likely drafted tokens are accepted, learned from what became of earlier ones."""

from __future__ import annotations

import numpy as np

from vllm_hsd.budget import constants


class AcceptanceEstimates:
    """Acceptance probabilities of the tokens of several drafters, given those before were accepted.

    A drafter's own estimates are corrected twice: by what became of tokens with such estimates at
    such places in all requests, and by accepted over expected tokens in this request.

    Args:
        num_drafters: what drafts, and for whom: each has a row of its own here.
        num_slots: requests at the same time.

    Attributes:
        shared: [2, drafters, PLACES, BINS] accepted and verified tokens of all requests.
        own: [2, drafters, slots] accepted and expected tokens of each request.
        drafts: [2, drafters] drafts with tokens, and all that were requested.
    """

    def __init__(self, num_drafters: int, num_slots: int) -> None:
        self.shared = np.zeros((2, num_drafters, constants.PLACES, constants.BINS))
        self.own = np.zeros((2, num_drafters, num_slots))
        self.drafts = np.ones((2, num_drafters))

    def corrected(self, drafter: int, estimates: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Estimates by what became of tokens with such; estimates and places are broadcast.

        Args:
            drafter: which one made them.
            estimates: its own, in [0, 1].
            places: int64, tokens of the drafter before each of them.
        """
        place, at = np.minimum(places, constants.PLACES - 1), bins(estimates)
        accepted, verified = self.shared[:, drafter, place, at]
        prior = constants.PRIOR_WEIGHT
        found: np.ndarray = (accepted + prior * estimates) / (verified + prior)
        return found

    def scale(self, drafter: int, slots: np.ndarray) -> np.ndarray:
        """[n] accepted over expected tokens in these requests, 1 before any."""
        accepted, expected = self.own[:, drafter, slots] + constants.PRIOR_WEIGHT
        ratio: np.ndarray = accepted / expected
        return ratio

    def ahead(self, drafter: int, slots: np.ndarray, width: int) -> np.ndarray:
        """[n, width] acceptance of a draft's tokens in [n] slots, before their estimates."""
        each = self.expected(drafter, width) * self.scale(drafter, slots)[:, None]
        found: np.ndarray = np.minimum(each, 1.0)
        return found

    def expected(self, drafter: int, width: int) -> np.ndarray:
        """[width] acceptance of a draft's tokens, whose estimates are not known, in any request.

        A place begins with what is known of all.
        """
        accepted, verified = self.shared[:, drafter].sum(-1)
        prior = constants.PRIOR_WEIGHT * constants.PRIOR_ACCEPTANCE
        pooled = (accepted.sum() + prior) / (verified.sum() + constants.PRIOR_WEIGHT)
        known = (accepted + constants.PRIOR_WEIGHT * pooled) / (verified + constants.PRIOR_WEIGHT)
        found: np.ndarray = known[np.minimum(np.arange(width), constants.PLACES - 1)]
        return found

    def observe(
        self,
        drafter: int,
        slots: np.ndarray,
        estimates: np.ndarray,
        expected: np.ndarray,
        verified: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """Update the estimates from one verified draft per request.

        Args:
            drafter: whose drafts they are.
            slots: [n] int64.
            estimates, expected: [n, width] its own, and as `corrected` when it was drafted.
            verified: [n] int64 tokens that there is a verdict for; 0 says nothing.
            accepted: [n] int64, at most `verified`.
        """
        place = np.arange(estimates.shape[1])
        tried = place < np.minimum(accepted + 1, verified)[:, None]
        own = self.own[:, drafter, slots] * np.where(verified > 0, constants.MEMORY, 1.0)
        own[0] += accepted
        own[1] += (expected * tried).sum(1)
        self.own[:, drafter, slots] = own
        request, where = tried.nonzero()
        group = np.minimum(where, constants.PLACES - 1), bins(estimates[tried])
        np.add.at(self.shared[0, drafter], group, where < accepted[request])
        np.add.at(self.shared[1, drafter], group, 1)
        self.shared[:, drafter] *= _fading(self.shared[1, drafter].sum(-1))[:, None]

    def count(self, drafter: int, filled: int, requested: int) -> None:
        """Take in that `filled` of `requested` drafts hold any token."""
        self.drafts[:, drafter] += filled, requested
        self.drafts[:, drafter] *= _fading(self.drafts[1, drafter])

    def fill(self, drafter: int) -> float:
        """Share of drafts that hold any token: a lookup often finds none."""
        return float(self.drafts[0, drafter] / self.drafts[1, drafter])

    def forget(self, slot: int) -> None:
        """The slot has a new request."""
        self.own[:, :, slot] = 0


def _fading(count: np.ndarray) -> np.ndarray:
    kept: np.ndarray = constants.REMEMBERED / np.maximum(count, constants.REMEMBERED)
    return kept


def bins(estimates: np.ndarray) -> np.ndarray:
    """int64 of the same shape, probabilities as one of BINS."""
    return np.minimum((estimates * constants.BINS).astype(np.int64), constants.BINS - 1)
