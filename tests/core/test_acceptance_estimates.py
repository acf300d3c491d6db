"""Learned acceptance: shared by all requests, and what a request adds to it."""

import numpy as np
import pytest

from vllm_hsd.core.acceptance import PLACES, PRIOR_ACCEPTANCE, Acceptance

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
    acceptance = Acceptance(1, 1)
    feed(acceptance, [rate], 300)
    survival = np.cumprod(ahead(acceptance, [0])[0])
    assert np.abs(survival - rate ** np.arange(1, LENGTH + 1)).max() < 0.12


def test_requests_are_told_apart_after_a_dozen_drafts():
    acceptance = Acceptance(1, 4)
    feed(acceptance, [0.9, 0.9, 0.3, 0.3], 12)
    first = ahead(acceptance, range(4))[:, 0]
    assert first[:2].min() > first[2:].max() + 0.15


def test_a_new_request_starts_as_the_others_are_and_takes_what_is_known_of_it_along():
    acceptance = Acceptance(1, 2)
    feed(acceptance, [0.9], 200)
    assert ahead(acceptance, [1])[0, 0] == pytest.approx(0.9, abs=0.05)
    feed(acceptance, [0.1], 5)
    before, kept = ahead(acceptance, [0]), acceptance.set_aside(0)
    acceptance.forget(0)
    assert np.array_equal(*ahead(acceptance, [0, 1]))
    acceptance.restore(1, kept)
    assert np.array_equal(ahead(acceptance, [1]), before)


def test_a_request_whose_text_changes_is_followed():
    acceptance = Acceptance(1, 1)
    feed(acceptance, [0.95], 200)
    feed(acceptance, [0.2], 60)
    assert ahead(acceptance, [0])[0, 0] < 0.55


def test_places_that_short_drafts_do_not_reach_keep_what_is_known_of_them():
    """Else estimates that are censored by stopping would keep drafts short for ever."""
    acceptance = Acceptance(1, 1)
    feed(acceptance, [0.9], 200)
    feed(acceptance, [0.9], 3000, length=1)
    assert acceptance.expected(0, LENGTH).min() > 0.85
    unseen = Acceptance(1, 1)
    feed(unseen, [0.9], 200, length=1)
    assert unseen.expected(0, LENGTH)[PLACES - 1] == pytest.approx(0.9, abs=0.1)


def test_what_an_estimate_is_worth_is_learned():
    """Right where it is sure by half, wrong where it seems certain."""
    acceptance = Acceptance(1, 2)
    for number in range(100):
        right = number % 2
        feed(acceptance, [float(right)], 1, estimate=0.5 if right else 0.9)
    found = acceptance.corrected(0, np.array([0.5, 0.9]), np.zeros(2, int))
    assert found[0] > 0.9 and found[1] < 0.1


def test_nothing_known_and_drafts_that_stay_empty():
    acceptance = Acceptance(1, 1)
    assert np.all(ahead(acceptance, [0]) == PRIOR_ACCEPTANCE)
    nothing = np.zeros((1, 1, 2))
    none = np.zeros((1, 1), int)
    acceptance.observe(slice(0, 1), np.array([0]), nothing, nothing, none, none)
    assert np.all(ahead(acceptance, [0]) == PRIOR_ACCEPTANCE)
    for _ in range(300):
        acceptance.count(0, 1, 4)
    assert acceptance.fill(0) == pytest.approx(0.25, abs=0.02)
