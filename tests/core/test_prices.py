"""Learned prices on simulated serving: no source is used that costs more than it wins.

Times are counted by the simulation, so no test depends on the clock. Fixed seeds; the margins hold
the noise of these numbers of steps.
"""

import itertools

import numpy as np
import pytest
from support.simulated_sources import LENGTH, Serving

from vllm_hsd.core.prices import FORBIDDEN, PriceEstimates
from vllm_hsd.core.step_times import StepTimes


def memory_bound(tokens):
    return 0.08 * (1 + 0.01 * tokens)


def cpu(tokens):
    """Between the two, as a small model in 16 bits on a CPU."""
    return 0.016 + 0.0008 * tokens


def compute_bound(tokens):
    return 0.02 + 0.01 * tokens


LOOKUP, RARE = (0.85, 0.6, 0.3), (0.3, 0.5, 0.5)


def speedups(target, size: int, *, lookups=(), drafter=None, **settings) -> tuple[float, Serving]:
    """Over no drafts, once learned; and the simulation."""
    serving = Serving(target, list(lookups), drafter, size, **settings)
    serving.run(400 // size + 100)
    serving.lengths.clear()
    return serving.run(200 // size + 100) * target(size) / size, serving


MIXES = {
    "weak drafter": ((LOOKUP, RARE), (0.45, 0.25)),
    "strong drafter": ((RARE,), (0.8, 0.1)),
}


# Hundreds of steps of one request each: one of three machines in the fast form.
STRONG_ALONE = [("strong drafter", target, 1) for target in (memory_bound, compute_bound)]


@pytest.mark.parametrize(
    ("mix", "target", "size"),
    [
        pytest.param(*case, marks=pytest.mark.slow) if case in STRONG_ALONE else case
        for case in itertools.product(MIXES, (memory_bound, cpu, compute_bound), (1, 16))
    ],
)
def test_a_mix_is_never_slower_than_no_drafts_nor_than_its_best_source(mix, target, size):
    lookups, (rate, cost) = MIXES[mix]
    drafter = rate, cost * target(1)
    mixed, _ = speedups(target, size, lookups=lookups, drafter=drafter)
    alone = [speedups(target, size, lookups=lookups)[0], speedups(target, size, drafter=drafter)[0]]
    assert mixed > 0.96 and mixed > 0.92 * max(alone)


def test_a_drafter_that_costs_more_than_it_wins_is_not_used():
    step = cpu(1)
    speedup, serving = speedups(cpu, 1, drafter=(0.3, 0.5 * step))
    assert np.mean(serving.lengths) < 0.05 and speedup > 0.97
    _, useful = speedups(cpu, 1, drafter=(0.8, 0.1 * step))
    assert np.mean(useful.lengths) > 2


def test_drafts_get_shorter_as_the_batch_grows():
    lengths = [np.mean(speedups(cpu, size, lookups=[LOOKUP])[1].lengths) for size in (1, 16, 64)]
    assert lengths[0] > 1.5 * lengths[1] > 2 * lengths[2]


def test_requests_that_must_repeat_pay_fixed_prices():
    chosen = []
    for target in (memory_bound, compute_bound):
        serving = Serving(target, [LOOKUP, RARE], (0.6, 0.01), 4, repeats=True)
        serving.run(100)
        chosen.append(serving.lengths)
    assert chosen[0] == chosen[1]


def test_a_machine_that_becomes_slower_for_a_while_does_not_end_drafting():
    slow = [1.0]
    serving = Serving(lambda tokens: slow[0] * cpu(tokens), [LOOKUP])
    serving.run(100)
    steady = serving.run(200) * cpu(1)
    for factor in (5.0, 1.0, 3.0, 1.0):
        slow[0] = factor
        serving.run(100)
    assert serving.run(300) * cpu(1) > 0.85 * steady


def known(tokens_and_seconds) -> StepTimes:
    times = StepTimes()
    for _ in range(5):
        for tokens, seconds in tokens_and_seconds:
            times.observe(tokens, seconds)
    return times


def test_before_the_time_without_drafts_is_known_nothing_is_drafted():
    estimates = PriceEstimates(LENGTH, [StepTimes()], StepTimes())
    assert estimates.prices(0, 4, 0.1).verify[1] >= FORBIDDEN
    estimates = PriceEstimates(LENGTH, [known([(4, 1.0)])], StepTimes())
    assert estimates.prices(0, 4, 0.1).verify[1] < 1
    assert estimates.prices(0, 64, 0.1).verify[1] >= FORBIDDEN


def test_a_price_is_what_the_time_would_give_otherwise():
    estimates = PriceEstimates(LENGTH, [known([(1, 1.0), (9, 1.8)])], known([(1, 0.25)]))
    found = estimates.prices(0, 1, 0.1)
    assert found.verify[0] == 0 and found.verify[8] == pytest.approx(0.8, rel=0.15)
    assert found.forward == pytest.approx(0.25, rel=0.15)
    # Drafts that double the tokens per time make time twice as valuable.
    for _ in range(500):
        estimates.observe(0, size=1, drafted=8, emitted=4, seconds=0.2)
    assert estimates.gain(0) == pytest.approx(2, rel=0.05)
    assert estimates.prices(0, 1, 0.1).forward == pytest.approx(2 * found.forward, rel=0.05)


def test_without_drafts_for_long_they_become_cheaper_for_a_step():
    estimates = PriceEstimates(LENGTH, [known([(1, 1.0), (9, 9.0)])], StepTimes())
    prices = []
    for _ in range(1000):
        prices.append(estimates.prices(0, 1, 0.1).verify[1])
        estimates.observe(0, size=1, drafted=0, emitted=1, seconds=0.0)
    cheap = np.flatnonzero(np.array(prices) < 0.9 * max(prices))
    assert 2 <= len(cheap) <= 6 and np.all(np.diff(np.diff(cheap)) > 0)


def test_a_price_follows_the_size_at_once_and_the_times_within_eight_steps():
    times = known([(1, 1.0), (9, 1.8), (4, 1.3), (36, 4.5)] * 20)
    estimates = PriceEstimates(LENGTH, [times], StepTimes())
    alone = estimates.prices(0, 1, 0.1).verify[8]
    assert estimates.prices(0, 4, 0.1).verify[8] > 2 * alone
    assert estimates.prices(0, 1, 0.1).verify[8] == pytest.approx(alone)
    for _ in range(8):
        times.observe(9, 3.6)
    assert estimates.prices(0, 1, 0.1).verify[8] > 1.1 * alone
