"""The dynamic program against brute force, and the papers' tables."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hsd.errors import UserError
from vllm_hsd.planner import optimize
from vllm_hsd.planner.theory import (
    acceptance_rate,
    cascade_latency,
    expected_rounds,
    survival_table,
)


def random_instance(seed, models):
    """Ascending costs [M + 1] and rates [M + 1, M + 1] of random laws."""
    rng = np.random.default_rng(seed)
    laws = [rng.dirichlet(np.ones(6))]
    for _ in range(models):  # neighbours resemble each other
        laws.append(0.6 * laws[-1] + 0.4 * rng.dirichlet(np.ones(6)))
    laws = np.stack(laws)
    costs = np.sort(np.exp(rng.uniform(-4, 2, size=models + 1)))
    return costs, acceptance_rate(laws[:, None], laws[None])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4))
def test_optimum_equals_brute_force(seed, models, max_budget):
    costs, rates = random_instance(seed, models)
    best = optimize.solve(optimize.paper_graph(costs, rates, max_budget))[0]
    assert best.cost == pytest.approx(
        optimize.brute_force(costs, rates, max_budget)[0].cost, rel=1e-12
    )
    pairs = [*best.levels, models]
    chain = [rates[a, b] for a, b in itertools.pairwise(pairs)]
    assert cascade_latency(costs[pairs], chain, best.draft_lengths) == pytest.approx(best.cost)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 4), st.integers(2, 25))
def test_k_best_equal_brute_force(seed, models, max_budget, k):
    costs, rates = random_instance(seed, models)
    graph = optimize.paper_graph(costs, rates, max_budget)
    found = optimize.solve(graph, k=k)
    expected = optimize.brute_force(costs, rates, max_budget, k=k)
    assert [p.cost for p in found] == pytest.approx([p.cost for p in expected], rel=1e-9)
    assert len({(p.levels, p.draft_lengths) for p in found}) == len(found)
    for plan in found:
        assert optimize.plan_cost(graph, plan.levels, plan.draft_lengths) == pytest.approx(
            plan.cost
        )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_max_levels_equals_brute_force_over_shallow_cascades(seed, max_levels):
    costs, rates = random_instance(seed, 4)
    best = optimize.solve(optimize.paper_graph(costs, rates, 3), max_levels=max_levels)[0]
    shallow = [
        plan
        for plan in optimize.brute_force(costs, rates, 3, k=10**6)
        if len(plan.levels) <= max_levels
    ]
    assert best.cost == pytest.approx(shallow[0].cost)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_capped_graph_with_recorded_survival_equals_brute_force(seed):
    """Costs that depend on tokens and survival tables that depend on budget and position."""
    rng = np.random.default_rng(seed)
    models, size = 3, 4
    draft = np.sort(rng.uniform(0.1, 1, models))
    verify = np.sort(rng.uniform(0.1, 3, (models + 1, size + 1)), axis=None)
    verify = verify.reshape(models + 1, size + 1)
    shape = (models + 1, models + 1, size + 1, size + 1, size + 1)
    survival = np.sort(rng.random(shape))[..., ::-1]
    survival[..., 0] = 1.0
    graph = optimize.build_graph(draft, verify, 4.0, survival, capped=True)
    costs = [
        optimize.plan_cost(graph, levels, draft_lengths)
        for levels, draft_lengths in optimize.all_cascades(models, size)
    ]
    found = optimize.solve(graph, k=5)
    assert [plan.cost for plan in found] == pytest.approx(sorted(costs)[:5])


def test_renewal_counts_rounds_and_asked_tokens():
    survival = survival_table(0.7, 6)
    rounds = optimize.renewal(survival, np.ones(7), capped=False)
    for asked in (1, 3, 6):
        for wanted in (1, 4, 6):
            assert rounds[asked - 1, wanted - 1] == pytest.approx(
                expected_rounds(0.7, asked, wanted)
            )
    capped = optimize.renewal(survival, np.ones(7), capped=True)
    asked = optimize.renewal(survival, np.arange(7.0), capped=True)
    # One token is owed: one round, nothing asked. Two: ask for one; if it fails, one more round.
    assert capped[3, :2] == pytest.approx([1.0, 1.3])
    assert asked[3, :2] == pytest.approx([0.0, 1.0])


# Appendix B.3, Tables 6 and 7: rates of models 1..6, row i, columns i + 1..6.
TABLES = {
    1: (
        [0.00001, 0.003, 0.01, 0.25, 4, 33],
        [[0.75, 0.5, 0.25, 0, 0], [0.75, 0.5, 0.25, 0.05], [0.75, 0.5, 0.3], [0.75, 0.55], [0.8]],
        {1: (1.0, 33.00), 2: (2.2971, 14.37)},
        [2.94, 3.10, 3.10, 3.11],
    ),
    8: (
        [0.00005, 0.0002, 0.05, 2, 8, 33],
        [[0.525, 0.125, 0, 0, 0], [0.6, 0.275, 0.025, 0], [0.675, 0.425, 0.225], [0.75, 0.55],
         [0.8]],
        {1: (1.0, 33.00), 2: (1.7091, 19.31)},
        [1.93, 2.12, 2.13, 2.13],
    ),
}  # fmt: skip


@pytest.mark.parametrize("table", [1, 8])
def test_motivating_examples_of_the_paper(table):
    costs, upper, exact, rest = TABLES[table]
    rates = np.eye(6)
    for i, row in enumerate(upper):
        rates[i, i + 1 :] = rates[i + 1 :, i] = row
    speedups = {}
    for models in range(1, 7):
        graph = optimize.paper_graph(costs[-models:], rates[-models:, -models:], 15)
        speedups[models] = 33 / optimize.solve(graph)[0].cost
    for models, (speedup, latency) in exact.items():
        assert round(speedups[models], 4) == speedup
        assert round(33 / speedups[models], 2) == latency
    assert [round(speedups[models], 2) for models in range(3, 7)] == rest


def test_a_batch_size_has_its_own_plan():
    """When verification grows with the batch, a shorter draft wins."""
    survival = survival_table(np.full((2, 2), 0.8), 8)
    draft_lengths = []
    for batch in (1, 16):
        verify = np.ones((2, 9)) + 0.04 * batch * np.arange(9)
        graph = optimize.build_graph(np.full(1, 0.02), verify, 1.0, survival, capped=True)
        draft_lengths.append(optimize.solve(graph)[0].draft_lengths)
    assert draft_lengths[0] > draft_lengths[1]


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([0.0, 1.0], "cost of model 0 is 0: it must be above 0"),
        ([1.0, -2.0], "cost of model 1 is -2"),
        ([float("nan"), 1.0], "cost of model 0 is nan"),
    ],
)
def test_impossible_costs_are_one_sentence(costs, message):
    with pytest.raises(UserError, match=message):
        optimize.paper_graph(costs, np.full((2, 2), 0.5), 4)


def test_eighty_candidates_are_solved():
    """The paper's largest instance: every layer of an 80-layer target, draft_lengths to 15."""
    position = np.linspace(0, 1, 81) ** 0.5
    rates = 1 - np.abs(position[:, None] - position)
    costs = np.arange(1, 82, dtype=float)
    graph = optimize.paper_graph(costs, rates, 15)
    best = optimize.solve(graph)[0]
    assert best.cost == pytest.approx(optimize.plan_cost(graph, best.levels, best.draft_lengths))
    assert best.cost < optimize.solve(graph, max_levels=1)[0].cost
