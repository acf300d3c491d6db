"""The dynamic program against brute force, and the papers' tables."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_tables import closed_forms, gsp_tables, paper_instance
from vllm_hsd.tools.planner import optimize
from vllm_hsd.tools.planner.predict import Selection
from vllm_hsd.tools.planner.survival import Acceptance, folded, independent_survival


def random_instance(seed, models):
    """Ascending costs [M + 1] and rates [M + 1, M + 1] of random distributions."""
    rng = np.random.default_rng(seed)
    probs = [rng.dirichlet(np.ones(6))]
    for _ in range(models):  # neighbors resemble each other
        probs.append(0.6 * probs[-1] + 0.4 * rng.dirichlet(np.ones(6)))
    probs = np.stack(probs)
    costs = np.sort(np.exp(rng.uniform(-4, 2, size=models + 1)))
    return costs, np.minimum(probs[:, None], probs[None]).sum(-1)


def latency(costs, rates, levels, draft_lengths):
    """Corollary 3.1."""
    chain = [*levels, len(costs) - 1]
    pairs = [rates[below, above] for below, above in itertools.pairwise(chain)]
    return closed_forms.cascade_latency(costs[chain], pairs, draft_lengths)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), st.integers(1, 25))
def test_k_best_equal_brute_force(seed, models, max_tokens, k):
    costs, rates = random_instance(seed, models)
    graph = paper_instance.paper_graph(costs, rates, max_tokens)
    found = optimize.solve(graph, k=k)
    cascades = paper_instance.all_cascades(models, max_tokens)
    expected = sorted(latency(costs, rates, *cascade) for cascade in cascades)[:k]
    assert found[0][1] == pytest.approx(expected[0], rel=1e-12)
    assert [c for _, c in found] == pytest.approx(expected, rel=1e-9)
    assert len({selection for selection, _ in found}) == len(found)
    for selection, cost in found:
        of_graph = paper_instance.selection_cost(graph, selection.levels, selection.draft_lengths)
        assert of_graph == pytest.approx(cost)
        closed = latency(costs, rates, selection.levels, selection.draft_lengths)
        assert closed == pytest.approx(cost)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_capped_graph_with_recorded_survival_equals_brute_force(seed, with_lookup):
    """Times that depend on tokens, survival that depends on draft length and position; lookups."""
    rng = np.random.default_rng(seed)
    models, size = 3, 4
    draft = np.sort(rng.uniform(0.1, 1, models))
    verify = np.sort(rng.uniform(0.1, 3, (models + 1) * (size + 1))).reshape(models + 1, size + 1)
    shape = (models + 1, models + 1, size + 1, size + 1, size + 1)
    survival = np.sort(rng.random(shape))[..., ::-1]
    survival[..., 0] = 1.0
    lookups = {}
    if with_lookup:
        joint = np.tril(rng.random((models + 1, *[size + 1] * 4)))
        lookups = {2: joint / joint.sum((-2, -1), keepdims=True)}
    acceptance = Acceptance(survival, lookups)
    graph = optimize.build_graph(draft, verify, 4.0, acceptance, capped=True)
    costs = {
        Selection(tuple(graph.order[node] for node in nodes), lengths): cost
        for nodes, lengths in paper_instance.all_cascades(models, size)
        if (cost := paper_instance.selection_cost(graph, nodes, lengths)) < np.inf
    }
    found = optimize.solve(graph, k=5)
    assert [cost for _, cost in found] == pytest.approx(sorted(costs.values())[:5])
    assert all(costs[selection] == pytest.approx(cost) for selection, cost in found)
    assert all(2 not in selection.levels[1:] for selection, _ in found if with_lookup)


def test_the_cost_to_verify_a_lookup_is_that_of_what_it_offers():
    joint = np.zeros((1, 4, 4, 4, 4))
    joint[..., 0, 0], joint[..., 2, 1], joint[..., 3, 3] = 0.5, 0.2, 0.3
    spent = optimize.expected_cost(joint, np.array([[1.0, 2.0, 4.0, 8.0]]))
    assert spent[0, 1, 0] == pytest.approx([1, 1.5, 2.5, 0.5 + 0.8 + 2.4])
    assert folded(joint[0, 0, 0], 2).tolist() == [[0.5, 0, 0], [0, 0, 0], [0, 0.2, 0.3]]


def test_renewal_counts_rounds_and_asked_tokens():
    survival = independent_survival(0.7, 6)
    one, asked = np.ones((1, 1, 1)), np.arange(7.0)[None, None]
    rounds = optimize.renewal(survival, one, capped=False)
    for length in (1, 3, 6):
        for wanted in (1, 4, 6):
            expected = closed_forms.expected_rounds(0.7, length, wanted)
            assert rounds[length - 1, wanted - 1] == pytest.approx(expected)
    capped = optimize.renewal(survival, one, capped=True)
    tokens = optimize.renewal(survival, asked, capped=True)
    # One token is owed: one round, nothing asked. Two: ask for one; if it fails, one more round.
    assert capped[3, :2] == pytest.approx([1.0, 1.3])
    assert tokens[3, :2] == pytest.approx([0.0, 1.0])


# Speed-ups and latencies as printed where they are exact; speed-ups of three to six models, where
# the paper estimates gamma.
PRINTED = {
    1: ({1: (1.0, 33.00), 2: (2.2971, 14.37)}, [2.94, 3.10, 3.10, 3.11]),
    8: ({1: (1.0, 33.00), 2: (1.7091, 19.31)}, [1.93, 2.12, 2.13, 2.13]),
}


@pytest.mark.parametrize("table", PRINTED)
def test_motivating_examples_of_the_paper(table):
    exact, rest = PRINTED[table]
    speedups = {models: 33 / gsp_tables.optimum(table, models)[1] for models in range(1, 7)}
    for models, (speedup, latency) in exact.items():
        assert round(speedups[models], 4) == speedup
        assert round(33 / speedups[models], 2) == latency
    assert [round(speedups[models], 2) for models in range(3, 7)] == rest
