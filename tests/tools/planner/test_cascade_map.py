"""The map of docs/when-cascades-pay.md agrees with closed forms where there are any."""

import numpy as np
import pytest

from benchmarks.paper_tables.closed_forms import cascade_latency, expected_tokens
from benchmarks.planner import cascade_map
from benchmarks.planner.two_levels import Drafters, best, small_at_target
from vllm_hsd.tools.planner.predict import Selection, predict


def test_the_best_single_drafter_is_leviathans():
    """Where the small model is never accepted, only the mid one counts: Theorem 3.8."""
    for cost, rate in ((0.05, 0.9), (0.2, 0.8), (0.4, 0.6)):
        found = best(Drafters(cost, 0.5, rate, 0.0, 0.0), max_draft=16)
        speedups = [1 / cascade_latency([cost, 1], [rate], [n]) for n in range(1, 17)]
        assert found.single_speedup == pytest.approx(max(speedups))
        assert found.single == Selection((1,), (int(np.argmax(speedups)) + 1,))
        # The cascade pays for drafts that bring nothing.
        assert found.ratio < 1


@pytest.mark.parametrize("n", [2, 5, 8])
def test_a_small_model_that_is_equal_to_the_mid_one_or_never_right(n):
    equal, wrong = Drafters(0.3, 0.1, 0.8, 1.0, 0.8), Drafters(0.3, 0.1, 0.8, 0.0, 0.0)
    # All drafts are accepted, or every token of mid costs one: but the last, which has no room.
    for drafters, drafted, passes in ((equal, n - 1, 1), (wrong, 1, n)):
        step = 1 + passes * 0.3 + (n - 1) * 0.03
        found = predict(Selection((0, 1), (drafted, n)), drafters.measured())
        assert found.ms_per_token == pytest.approx(step / expected_tokens(0.8, n))
    # But alone it is as good as mid, and cheaper than both.
    assert best(equal).ratio < 1


@pytest.mark.parametrize("share", [0.71, 1.0])
def test_the_third_rate_obeys_the_triangle_inequality(share):
    for a in np.linspace(0, 1, 11):
        for b in np.linspace(0, 1, 11):
            g = small_at_target(a, b, share)
            assert max(a + b - 1, 0) - 1e-12 <= g <= 1 - abs(a - b) + 1e-12
    assert small_at_target(0.8, 1.0) == pytest.approx(0.8)


def test_costs_and_rates_of_a_papers_run_are_recovered():
    rate, drafted, cost = 0.8, 6, 0.1
    tokens = expected_tokens(rate, drafted)
    speedup = 1 / cascade_latency([cost, 1], [rate], [drafted])
    found = cascade_map.single_drafter(1 / tokens, 1 - (tokens - 1) / drafted, speedup)
    assert found == pytest.approx((cost, rate))


def test_rows_of_the_map_and_of_the_papers():
    rows = cascade_map.cells([0.2], [0.05, 0.5])
    assert len(rows) == 2 * 3 * 3 * 2
    assert {row["best_single"] for row in rows} <= {"small", "mid"}
    lows = [cascade_map.on_the_map(each)["predicted_low"] for each in cascade_map.published()]
    assert sum(low is not None for low in lows) == 2
