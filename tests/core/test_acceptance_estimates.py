"""Learned acceptance: shared by all requests, and what a request adds to it."""

import numpy as np
import pytest

from vllm_hsd.core.acceptance import PLACES, AcceptanceEstimates

LENGTH = 6


def feed(acceptance, rates, drafts, seed=0, estimate=0.5, length=LENGTH):
    """Drafts for slots 0, 1, ... with the given acceptance rates."""
    rng, slots = np.random.default_rng(seed), np.arange(len(rates))
    for _ in range(drafts):
        kept = rng.random((len(rates), length)) < np.asarray(rates)[:, None]
        accepted = np.logical_and.accumulate(kept, axis=1).sum(1)
        estimates = np.full((1, len(rates), length), estimate)
        expected = acceptance.corrected(0, estimates, np.arange(length))
        verified = np.full((1, len(rates)), length)
        acceptance.observe(slice(0, 1), slots, estimates, expected, verified, accepted[None])


def ahead(acceptance, slots, width=LENGTH) -> np.ndarray:
    return acceptance.ahead(0, np.array(slots), 0, width)


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_survival_of_one_request_is_near_the_truth(rate):
    acceptance = AcceptanceEstimates(1, 1)
    feed(acceptance, [rate], 300)
    survival = np.cumprod(ahead(acceptance, [0])[0])
    assert np.abs(survival - rate ** np.arange(1, LENGTH + 1)).max() < 0.12


def test_a_new_request_starts_as_the_others_are_and_takes_what_is_known_of_it_along():
    acceptance = AcceptanceEstimates(1, 2)
    feed(acceptance, [0.9], 200)
    assert ahead(acceptance, [1])[0, 0] == pytest.approx(0.9, abs=0.05)
    feed(acceptance, [0.1], 5)
    before, kept = ahead(acceptance, [0]), acceptance.own[..., 0].copy()
    acceptance.forget(0)
    assert np.array_equal(*ahead(acceptance, [0, 1]))
    acceptance.own[..., 1] = kept
    assert np.array_equal(ahead(acceptance, [1]), before)


def test_places_that_short_drafts_do_not_reach_keep_what_is_known_of_them():
    """Else estimates that are censored by stopping would keep drafts short for ever."""
    acceptance = AcceptanceEstimates(1, 1)
    feed(acceptance, [0.9], 200)
    feed(acceptance, [0.9], 3000, length=1)
    assert acceptance.expected(0, LENGTH).min() > 0.85
    unseen = AcceptanceEstimates(1, 1)
    feed(unseen, [0.9], 200, length=1)
    assert unseen.expected(0, LENGTH)[PLACES - 1] == pytest.approx(0.9, abs=0.1)
