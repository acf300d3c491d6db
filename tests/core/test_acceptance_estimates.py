"""Learned acceptance: the shared curve, the factor of each request, and how both are forgotten."""

import numpy as np
import pytest

from vllm_hsd.core.acceptance import AcceptanceEstimates

LENGTH = 6


def feed(estimates, rates, drafts, seed=0, level=0):
    """Drafts of full length for slots 0, 1, ... with the given acceptance rates."""
    rng = np.random.default_rng(seed)
    slots = np.arange(len(rates))
    for _ in range(drafts):
        kept = rng.random((len(rates), LENGTH)) < np.asarray(rates)[:, None]
        accepted = np.where(kept.all(1), LENGTH, kept.argmin(1))
        estimates.observe(level, slots, np.full(len(rates), LENGTH), accepted)


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_survival_of_one_request_is_near_the_truth(rate):
    estimates = AcceptanceEstimates(1, 1, LENGTH)
    feed(estimates, [rate], 300)
    truth = rate ** np.arange(1, LENGTH + 1)
    assert np.abs(estimates.survival(0, np.array([0]))[0] - truth).max() < 0.12


def test_requests_are_told_apart_after_a_dozen_drafts():
    estimates = AcceptanceEstimates(1, 4, LENGTH)
    feed(estimates, [0.9, 0.9, 0.3, 0.3], 12)
    first = estimates.survival(0, np.arange(4))[:, 0]
    assert first[:2].min() > first[2:].max() + 0.15


def test_a_new_request_starts_as_the_others_are():
    estimates = AcceptanceEstimates(1, 2, LENGTH)
    feed(estimates, [0.9], 200)
    assert estimates.survival(0, np.array([1]))[0, 0] == pytest.approx(0.9, abs=0.05)
    feed(estimates, [0.1], 5)
    estimates.forget(0)
    alike = estimates.survival(0, np.arange(2))
    assert np.array_equal(alike[0], alike[1])


def test_a_request_takes_what_is_known_of_it_to_another_slot():
    estimates = AcceptanceEstimates(1, 2, LENGTH)
    feed(estimates, [0.1], 30)
    before = estimates.survival(0, np.array([0]))
    kept = estimates.set_aside(0)
    estimates.forget(0)
    estimates.restore(1, kept)
    assert np.array_equal(estimates.survival(0, np.array([1])), before)
    assert not np.array_equal(estimates.survival(0, np.array([0])), before)


def test_a_request_whose_text_changes_is_followed():
    estimates = AcceptanceEstimates(1, 1, LENGTH)
    feed(estimates, [0.95], 200)
    feed(estimates, [0.2], 60)
    assert estimates.survival(0, np.array([0]))[0, 0] < 0.5


def test_a_request_that_rests_becomes_like_the_others_again():
    estimates = AcceptanceEstimates(1, 2, LENGTH)
    feed(estimates, [0.1, 0.9], 40)
    before = estimates.survival(0, np.arange(2))[:, 0]
    for _ in range(4000):
        estimates.rest([0], np.array([0]))
    after = estimates.survival(0, np.arange(2))[:, 0]
    assert after[0] > before[0] + 0.1 and after[1] == before[1]


def test_levels_do_not_mix_and_empty_drafts_lower_only_the_fill():
    estimates = AcceptanceEstimates(2, 1, LENGTH)
    feed(estimates, [0.2], 50, level=1)
    untouched = AcceptanceEstimates(2, 1, LENGTH)
    assert np.array_equal(estimates.hazard(0), untouched.hazard(0))
    before = estimates.hazard(1)
    estimates.observe(1, np.array([0]), np.array([0]), np.array([0]))
    for filled in [1, 0] * 50:
        estimates.count(1, 1, filled)
    assert np.array_equal(before, estimates.hazard(1))
    assert 0.4 < estimates.fill(1) < 0.6


def test_probabilities_stay_probabilities_when_everything_is_rejected_or_accepted():
    for accepted in (0, LENGTH):
        estimates = AcceptanceEstimates(1, 1, LENGTH)
        for _ in range(2000):
            estimates.observe(0, np.array([0]), np.array([LENGTH]), np.array([accepted]))
        survival = estimates.survival(0, np.array([0]))
        assert np.all((survival > 0) & (survival <= 1)) and np.all(np.diff(survival) <= 0)


def test_seeds_hold_before_the_first_draft_and_are_forgotten():
    estimates, slots = AcceptanceEstimates(1, 1, LENGTH), np.array([0])
    estimates.seed(0, 0.9 ** np.arange(LENGTH + 1), 0.25)
    assert estimates.survival(0, slots)[0] == pytest.approx(0.9 ** np.arange(1, 7), abs=0.03)
    assert estimates.fill(0) == pytest.approx(0.25)
    feed(estimates, [0.2], 300)
    for _ in range(300):
        estimates.count(0, 1, 1)
    unseeded = AcceptanceEstimates(1, 1, LENGTH)
    feed(unseeded, [0.2], 300)
    assert abs(estimates.survival(0, slots) - unseeded.survival(0, slots)).max() < 0.03
    assert estimates.fill(0) > 0.9


@pytest.mark.parametrize("measured", [2, LENGTH + 3])
def test_drafts_that_were_measured_may_be_shorter_or_longer(measured):
    estimates = AcceptanceEstimates(1, 1, LENGTH)
    estimates.seed(0, 0.8 ** np.arange(measured + 1), 1.0)
    assert np.all(np.abs(estimates.hazard(0) - 0.2) < 0.03)
