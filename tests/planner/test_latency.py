"""Predicted latency against the discrete-event simulation, with coins and with real tokens."""

import numpy as np
import pytest
from planner import toy
from pydantic import ValidationError

from vllm_hsd.errors import UserError
from vllm_hsd.planner import latency, optimize, recorded, simulate, theory
from vllm_hsd.planner.costs import Costs, TimeTable

LONGEST = 12


def table(base, slope):
    """A forward that grows with tokens and batch size."""
    batches, tokens = [1, 4, 16], [1, 4, 16]
    ms = [[base * b**0.2 + slope * (t - 1) * b**0.5 for t in tokens] for b in batches]
    return TimeTable(batch_sizes=batches, tokens=tokens, ms=ms)


@pytest.fixture(scope="module")
def costs():
    forward = [table(0.2, 0.02), table(0.5, 0.05), table(1.5, 0.1), table(5.0, 0.2)]
    return Costs(forward=forward, overhead={"verify": table(0.3, 0.1), "draft": table(0.1, 0)})


@pytest.fixture(scope="module")
def survival():
    """Drafters 0..2 and the target, independent acceptance."""
    rates = [[1, 0.7, 0.6, 0.5], [0.7, 1, 0.8, 0.7], [0.6, 0.8, 1, 0.85], [0.5, 0.7, 0.85, 1]]
    return theory.survival_table(rates, LONGEST)


def flat(*ms):
    return Costs(forward=[TimeTable(batch_sizes=[1], tokens=[1], ms=[[x]]) for x in ms])


CASCADES = [
    latency.Cascade((0,), (5,)),
    latency.Cascade((0, 1), (3, 8)),
    latency.Cascade((0, 1, 2), (3, 6, 12)),
    latency.Cascade((1, 2), (4, 2)),
    latency.Cascade((0, 2), (4, 12), rounds=(None, 2)),
    latency.Cascade((1, 2), (4, 10), tail=3),
    latency.Cascade((0, 1, 2), (2, 4, 9), rounds=(None, 1, 2), tail=2),
    latency.Cascade((0, 1, 2), (2, 4, 9), shares_target_kv=frozenset({0, 2})),
]


@pytest.mark.parametrize("cascade", CASCADES, ids=str)
def test_prediction_is_the_mean_of_the_simulation(cascade, costs, survival):
    predicted = latency.predict(cascade, costs, survival)
    world = simulate.Coins(cascade, survival, np.random.default_rng(0))
    seen = simulate.simulate(cascade, costs, world, replicas=500, steps=20)
    assert predicted.ms_per_token == pytest.approx(seen.ms_per_token, abs=5 * seen.stderr)
    assert predicted.level_calls == pytest.approx(seen.level_calls, rel=0.05)
    assert predicted.level_ms == pytest.approx(seen.level_ms, rel=0.05)
    assert predicted.stderr == 0.0


def test_one_level_is_the_closed_form(survival):
    predicted = latency.predict(latency.Cascade((1,), (6,)), flat(0.1, 0.5, 1, 5), survival)
    assert predicted.ms_per_token == pytest.approx(
        theory.cascade_latency([0.5, 5], [0.7], [6]), rel=1e-12
    )
    assert predicted.tokens_per_step == pytest.approx(theory.expected_tokens(0.7, 6))


def test_no_level_is_the_plain_target(costs, survival):
    assert latency.predict(latency.Cascade((), ()), costs, survival).ms_per_token == 5.0


def test_two_levels_never_overshoot(survival):
    """Budgets 2 and 3: the second request is for what is missing, less one."""
    predicted = latency.predict(latency.Cascade((0, 1), (2, 3)), flat(1, 10, 1, 100), survival)
    rate = 0.7
    # Ask 2: all kept -> done. One kept -> one owed, no draft. None kept -> two owed: ask 1.
    rounds = 1 + rate * (1 - rate) + (1 - rate) * (1 + (1 - rate))
    drafted = 2 + (1 - rate) * 1
    assert predicted.level_calls == pytest.approx((drafted, rounds, 1.0))


@pytest.mark.parametrize("recorded_tables", [False, True])
def test_graph_agrees_with_the_prediction_when_costs_ignore_the_lag(survival, recorded_tables):
    """The graph knows no lag; with costs that do not depend on tokens both are the same."""
    if recorded_tables:  # any that depend on budget and position, but the target's on position
        shape = (4, 4, LONGEST + 1, LONGEST + 1, LONGEST + 1)
        survival = -np.sort(-np.random.default_rng(3).random(shape), axis=-1)
        survival[..., 0] = 1.0
        survival[-1] = survival[-1, :, :, :1]
    costs = flat(0.2, 1.0, 3.0, 9.0)
    draft = np.array([0.2, 1.0, 3.0])
    verify = np.repeat([[0.2], [1.0], [3.0], [9.0]], LONGEST + 1, axis=1)
    graph = optimize.build_graph(draft, verify, 9.0, survival, capped=True)
    for levels, draft_lengths in (((0,), (4,)), ((0, 1), (3, 8)), ((1, 2), (2, 9))):
        cost = optimize.plan_cost(graph, levels, draft_lengths)
        predicted = latency.predict(latency.Cascade(levels, draft_lengths), costs, survival)
        assert predicted.ms_per_token == pytest.approx(cost)


def test_finite_requests(costs, survival):
    cascade = latency.Cascade((0, 1), (3, 8))
    endless = latency.predict(cascade, costs, survival)
    long = latency.predict(cascade, costs, survival, output_tokens=2000)
    assert long.ms_per_token == pytest.approx(endless.ms_per_token, rel=0.002)
    # One token to come: no draft. Two: the drafter cannot be asked, its verifier makes one.
    one = latency.predict(cascade, costs, survival, output_tokens=2)
    assert one.level_calls == (0.0, 0.0, 1.0) and one.tokens_per_step == 1.0
    two = latency.predict(cascade, costs, survival, output_tokens=3)
    steps = 1 * 0.7 + 2 * 0.3
    assert two.level_calls == pytest.approx((0.0, 1 / steps, 1.0))
    assert two.tokens_per_step == pytest.approx(2 / steps)


def test_a_batch_waits_for_its_slowest_request(costs, survival):
    cascade = latency.Cascade((0, 1), (3, 8))
    world = simulate.Coins(cascade, survival, np.random.default_rng(0))
    together = simulate.simulate(cascade, costs, world, batch=4, replicas=40, steps=10)
    assert together.level_calls[1] > latency.predict(cascade, costs, survival).level_calls[1]
    assert together.tokens_per_step == pytest.approx(3.2, abs=0.2)


@pytest.mark.parametrize("verifier", recorded.VERIFIERS)
@pytest.mark.parametrize(("levels", "draft_lengths"), [((1,), (6,)), ((0, 1), (3, 8))])
def test_recorded_ratios_predict_cascades_that_verify_tokens(verifier, levels, draft_lengths):
    """Within the noise of the simulation for recorded ratios; rates alone miss the verifier."""
    rng = np.random.default_rng(1)
    tables = toy.chain_family(rng, 3, drift=0.5)
    costs = flat(0.2, 1.0, 4.0)
    contexts = toy.sample_text(tables[-1], 300, 80, rng)
    seen = contexts[:, :-1].ravel()
    along = np.zeros((3, 3, 9, 9, 9))
    rates = np.zeros((3, 3))
    for above in range(3):
        text = contexts
        if above < 2:
            start = rng.choice(seen, 3000)
            text = toy.sample_text(tables[above], 3000, 8, rng, start=start)
        for below in range(3):
            ratios = toy.log_ratios(tables[below], tables[above], text)
            if above < 2:
                along[above, below] = recorded.survival_by_position(ratios, 8, verifier)
            else:
                along[above, below] = recorded.visited_survival(ratios, 8, verifier)[:, None]
            laws = tables[below][seen], tables[above][seen]
            rates[above, below] = theory.acceptance_rate(*laws).mean()
    cascade = latency.Cascade(levels, draft_lengths)
    world = toy.MarkovWorld([*(tables[i] for i in levels), tables[-1]], verifier, rng, 100)
    real = simulate.simulate(cascade, costs, world, replicas=100, steps=40)
    exact = latency.predict(cascade, costs, along)
    assert exact.ms_per_token == pytest.approx(real.ms_per_token, rel=0.01, abs=4 * real.stderr)
    independent = latency.predict(cascade, costs, theory.survival_table(rates, 8))
    if verifier == "standard":
        assert independent.ms_per_token == pytest.approx(real.ms_per_token, rel=0.05)
    else:
        assert independent.ms_per_token > 1.03 * exact.ms_per_token


def test_budgets_that_cannot_work_are_one_sentence(costs, survival):
    with pytest.raises(UserError, match="13 tokens is longer than the 12 tokens"):
        latency.predict(latency.Cascade((0,), (13,)), costs, survival)
    with pytest.raises(UserError, match="level 0 would never draft"):
        latency.predict(latency.Cascade((0, 1), (4, 1)), costs, survival)
    with pytest.raises(UserError, match="2 levels needs as many draft_lengths, not 1"):
        latency.Cascade((0, 1), (4,))


def test_time_tables_interpolate_and_prolong():
    times = TimeTable(batch_sizes=[1, 4], tokens=[1, 5], ms=[[1, 3], [4, 10]])
    assert times.at(1, 1) == 1 and times.at(4, 5) == 10
    assert times.at(1, 3) == 2
    assert times.at(2, 1) == 2
    assert times.at(1, 7) == 4
    with pytest.raises(ValidationError, match="ascending"):
        TimeTable(batch_sizes=[4, 1], tokens=[1], ms=[[1], [2]])
    with pytest.raises(ValidationError, match="one row per batch size"):
        TimeTable(batch_sizes=[1], tokens=[1, 2], ms=[[1]])
