"""Times of passes and pauses of trials, of which `test_simulated_serving` serves the whole."""

import itertools

import numpy as np
import pytest

from vllm_hsd.budget.constants import FIRST_PAUSE, LONGEST_PAUSE, TRIAL_STEPS
from vllm_hsd.budget.step_times import StepTimes
from vllm_hsd.budget.trials import Trials


def test_a_pass_that_takes_longer_over_fewer_tokens_is_told_from_noise():
    """As measured of a 1.5B in 16 bits on an older CPU; a fall that was seen once is none."""
    rng, taken = np.random.default_rng(0), {1: 230, 2: 266, 3: 195, 4: 193, 6: 190, 8: 253}
    times = StepTimes()
    for tokens in rng.permutation(list(taken) * 30).tolist():
        times.observe(tokens, taken[tokens] * np.exp(rng.normal(0, 0.03)))
    for tokens, seconds in taken.items():
        assert times.seconds(tokens) == pytest.approx(seconds, rel=0.05)
    assert times.seconds(3) <= times.seconds(4) <= times.seconds(6)
    times.observe(12, 100.0)
    assert times.seconds(8) <= times.seconds(12)


def test_a_stalled_pass_of_a_size_that_was_not_met_for_long_does_not_forbid_it():
    times = StepTimes()
    for tokens in [1, 8] * 20 + [1] * 300:
        times.observe(tokens, 0.02 + 0.001 * tokens)
    times.observe(8, 0.28)
    assert times.seconds(8) < 1.4 * 0.028


@pytest.mark.parametrize("tokens", [9, 13, 30])
def test_a_stalled_first_pass_of_a_size_does_not_forbid_it(tokens):
    """A longer pass of a larger size is believed: rows may be dear."""
    times = StepTimes()
    for known in [1, 8, 20] * 20:
        times.observe(known, 0.02 + 0.001 * known)
    times.observe(tokens, 0.28)
    assert times.seconds(tokens) < 1.1 * (0.02 + 0.001 * tokens)
    times.observe(48, 0.1)
    assert times.seconds(48) == pytest.approx(0.1, rel=0.01)


def test_trials_begin_at_once_and_their_pauses_double():
    trials = Trials(2)
    due = np.flatnonzero([trials.due(0) for _ in range(40_000)])
    assert due[:TRIAL_STEPS].tolist() == list(range(TRIAL_STEPS))
    pauses = np.diff(due[TRIAL_STEPS - 1 :])[::TRIAL_STEPS] - 1
    assert pauses[:3].tolist() == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert set(pauses[7:]) == {LONGEST_PAUSE}
    trials.pays(0)
    assert not any(trials.due(0) for _ in range(FIRST_PAUSE)) and trials.due(0)
    assert [trials.takes_part(1, count).sum() for count in (0, 1, 8, 64)] == [0, 1, 1, 1]


def test_a_trial_is_on_another_request_each_time_and_its_pause_passes_without_plans():
    trials, tried = Trials(1), []
    for _ in range(16):
        while not trials.due(0):
            for _ in range(8):
                trials.wait(0)
        tried.append(int(trials.takes_part(0, 4).argmax()))
        assert all(trials.due(0) for _ in range(TRIAL_STEPS - 1))
    assert tried == [0, 1, 2, 3] * 4


def test_a_trial_waits_until_its_cost_is_a_small_share():
    """But the first one does not wait for its drafts; the next pause is twice as long."""
    trials, waits = Trials(1), []
    for cost in ({"reading": 10.0, "drafts": 5.0}, {"drafts": 25.0}, {"reading": 10.0}):
        waits.append(next(n for n in itertools.count() if trials.due(0, **cost)))
        assert all(trials.due(0, **cost) for _ in range(TRIAL_STEPS - 1))
    assert waits == [200, 500, 1000]
