"""Learned step times: robust, monotone, following a machine that changes."""

import numpy as np
import pytest

from vllm_hsd.core.step_times import StepTimes


def true_seconds(tokens):
    return 0.01 + 0.002 * np.asarray(tokens)


def learned(observations: int = 40, noise: float = 0.1, seed: int = 0) -> StepTimes:
    rng = np.random.default_rng(seed)
    times = StepTimes(256)
    for _ in range(observations):
        for tokens in (1, 5, 17, 64):
            times.observe(tokens, true_seconds(tokens) * np.exp(rng.normal(0, noise)))
    return times


def test_more_tokens_never_look_faster():
    times = StepTimes(64)
    for tokens, seconds in ((1, 0.02), (2, 0.01), (8, 0.015), (64, 0.03)):
        times.observe(tokens, seconds)
    assert np.all(np.diff(times.seconds(np.arange(1, 65))) >= 0)


def test_stalled_steps_hardly_move_a_settled_estimate():
    times = learned()
    before = float(times.seconds(17))
    for _ in range(2):
        times.observe(17, 100 * before)
    assert float(times.seconds(17)) < 1.1 * before


def test_a_lasting_shift_is_followed_within_fifty_steps():
    times = learned()
    for _ in range(50):
        times.observe(17, 2 * float(true_seconds(17)))
    assert float(times.seconds(17)) == pytest.approx(2 * float(true_seconds(17)), rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, np.nan, np.inf])
def test_clocks_that_jump_are_ignored(seconds):
    times = learned(5)
    before = times.seconds(np.arange(1, 9))
    times.observe(5, seconds)
    assert np.array_equal(before, times.seconds(np.arange(1, 9)))


def test_memory_does_not_grow_with_observations():
    times = learned(500)
    assert len(times.sizes) == len(times.log_seconds) == len(times.weight) < 20
