"""The dynamic program against brute force; the papers' tables are in test_paper_tables.py."""

import numpy as np
import pytest

from benchmarks.paper_tables import closed_forms, paper_instance
from vllm_hsd.tools.planner import optimize
from vllm_hsd.tools.planner.predict import Selection
from vllm_hsd.tools.planner.survival import Acceptance, folded, independent_survival


@pytest.mark.parametrize("with_lookup", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_k_best_of_recorded_survival_equal_brute_force(seed, with_lookup):
    """Times that depend on tokens, survival that depends on draft length and position; lookups."""
    rng = np.random.default_rng(seed)
    models, size, k = 3, 4, int(rng.integers(1, 26))
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
    found = optimize.solve(graph, k=k)
    assert [cost for _, cost in found] == pytest.approx(sorted(costs.values())[:k])
    assert len({selection for selection, _ in found}) == len(found)
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
