"""Predicted latency against the discrete-event simulation, with tables and with real tokens."""

import numpy as np
import pytest
from support.simulated_cascade import TableAcceptance, simulate

from benchmarks.paper_tables import closed_forms, paper_instance
from vllm_hsd.errors import UserError
from vllm_hsd.planner import optimize, predict
from vllm_hsd.planner.latencies import Latencies, LatencyTable
from vllm_hsd.planner.predict import Measured, Selection
from vllm_hsd.planner.survival import Acceptance, independent_survival

LONGEST = 12
LOOKUP = 3  # index of the prompt lookup among the candidates


def table(base, slope):
    """A forward that grows with tokens and batch size."""
    batches, tokens = [1, 4, 16], [1, 4, 16]
    ms = [[base * b**0.2 + slope * (t - 1) * b**0.5 for t in tokens] for b in batches]
    return LatencyTable(batch_sizes=batches, tokens=tokens, ms=ms)


def random_lookup(verifiers, size, seed=0):
    """A lookup's table with all the shares that a measurement can have."""
    offered, accepted = np.tril_indices(size + 1)
    joint = np.zeros((verifiers, size + 1, size + 1, size + 1, size + 1))
    shares = np.random.default_rng(seed).dirichlet(np.ones(len(offered)), joint.shape[:3])
    joint[..., offered, accepted] = shares
    joint[-1] = joint[-1, :, :1]  # the same everywhere for the target
    return joint


def with_lookup(tables, joint):
    """Acceptance of models and, before the target, a lookup."""
    models, lookup = len(tables), len(tables) - 1
    wide = np.zeros((models + 1, models + 1, *tables.shape[2:]))
    wide[..., 0] = 1.0
    inner = [*range(models - 1), models]
    wide[np.ix_(inner, inner)] = tables
    reached = np.cumsum(joint.sum(-2)[..., ::-1], -1)[..., ::-1]
    within = np.arange(tables.shape[-1]) <= np.arange(tables.shape[-1])[:, None, None]
    wide[:, lookup] = np.minimum(reached * within, 1.0)
    return Acceptance(wide, {lookup: joint})


@pytest.fixture(scope="module")
def acceptance():
    """Drafters 0..2 with independent acceptance, a prompt lookup, and the target."""
    rates = [[1, 0.7, 0.6, 0.5], [0.7, 1, 0.8, 0.7], [0.6, 0.8, 1, 0.85], [0.5, 0.7, 0.85, 1]]
    return with_lookup(independent_survival(rates, LONGEST), random_lookup(5, LONGEST))


@pytest.fixture(scope="module")
def measured(acceptance):
    forward = [table(0.2, 0.02), table(0.5, 0.05), table(1.5, 0.1), table(0.03, 0), table(5, 0.2)]
    overhead = {"verify": table(0.3, 0.1), "draft": table(0.1, 0)}
    return Measured(Latencies(forward=forward, overhead=overhead), acceptance, frozenset({LOOKUP}))


def flat(acceptance, *ms):
    """Latencies that depend on nothing."""
    forward = [LatencyTable(batch_sizes=[1], tokens=[1], ms=[[x]]) for x in ms]
    return Measured(Latencies(forward=forward), acceptance, frozenset({LOOKUP}))


CASCADES = {
    "one model": Selection((0,), (5,)),
    "two models": Selection((0, 1), (3, 8)),
    "three models": Selection((0, 1, 2), (3, 6, 12)),
    "a dearer drafter below": Selection((1, 2), (4, 2)),
    "a lookup": Selection((LOOKUP,), (6,)),
    "a lookup below a model": Selection((LOOKUP, 1), (5, 8)),
    "a lookup below two models": Selection((LOOKUP, 0, 2), (4, 6, 12)),
    "two exits and a model": Selection((0, 1, 2), (2, 4, 9)),
    "a lookup below two exits": Selection((LOOKUP, 0, 2), (2, 4, 9)),
}


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("name", CASCADES)
def test_the_prediction_is_the_mean_of_the_simulation(name, batch, measured):
    """A batch waits for its slowest request: its levels are called more often."""
    selection = CASCADES[name]
    cacheless = frozenset({0, 2} if "exits" in name else set())
    measured = Measured(measured.latencies, measured.acceptance, cacheless | {LOOKUP})
    predicted = predict.predict(selection, measured, batch=batch)
    tokens = TableAcceptance(selection, measured.acceptance, np.random.default_rng(0))
    seen = simulate(selection, measured, tokens, batch=batch, replicas=400 // batch, steps=15)
    assert predicted.ms_per_token == pytest.approx(seen.ms_per_token, abs=5 * seen.stderr)
    assert predicted.level_calls == pytest.approx(seen.level_calls, rel=0.05)
    assert predicted.level_ms == pytest.approx(seen.level_ms, rel=0.05)


def test_one_level_is_the_closed_form(acceptance):
    predicted = predict.predict(Selection((1,), (6,)), flat(acceptance, 0.1, 0.5, 1, 1, 5))
    assert predicted.ms_per_token == pytest.approx(
        closed_forms.cascade_latency([0.5, 5], [0.7], [6]), rel=1e-12
    )
    assert predicted.tokens_per_step == pytest.approx(closed_forms.expected_tokens(0.7, 6))


@pytest.mark.parametrize("recorded", [False, True])
def test_the_graph_agrees_with_the_prediction_when_latencies_ignore_uncached_tokens(
    acceptance, recorded
):
    """The graph ignores uncached tokens; where they cost nothing both are the same."""
    if recorded:  # any tables that depend on draft length and position, but the target's on it
        shape = (5, 5, LONGEST + 1, LONGEST + 1, LONGEST + 1)
        survivals = -np.sort(-np.random.default_rng(3).random(shape), axis=-1)
        survivals[..., 0] = 1.0
        survivals[-1] = survivals[-1, :, :, :1]
        survivals[:, LOOKUP] = acceptance.survival[:, LOOKUP]
        acceptance = Acceptance(survivals, acceptance.lookups)
    found = flat(acceptance, 0.2, 1.0, 3.0, 0.1, 9.0)
    graph = optimize.measured_graph(found, 1)
    assert graph.order == (LOOKUP, 0, 1, 2)
    cascades = (((0,), (4,)), ((0, 1), (3, 8)), ((1, 2), (2, 9)), ((LOOKUP,), (5,)),
                ((LOOKUP, 1), (4, 9)), ((LOOKUP, 2), (3, 12)))  # fmt: skip
    for levels, draft_lengths in cascades:
        nodes = [graph.order.index(level) for level in levels]
        cost = paper_instance.selection_cost(graph, nodes, draft_lengths)
        predicted = predict.predict(Selection(levels, draft_lengths), found)
        assert predicted.ms_per_token == pytest.approx(cost)


def test_finite_requests(measured):
    cascade = Selection((0, 1), (3, 8))
    endless = predict.predict(cascade, measured)
    long = predict.predict(cascade, measured, output_tokens=2000)
    assert long.ms_per_token == pytest.approx(endless.ms_per_token, rel=0.002)
    # One token to come: no draft. Two: the drafter cannot be asked, its verifier makes one.
    one = predict.predict(cascade, measured, output_tokens=2)
    assert one.level_calls == (0.0, 0.0, 1.0) and one.tokens_per_step == 1.0
    two = predict.predict(cascade, measured, output_tokens=3)
    steps = 1 * 0.7 + 2 * 0.3
    assert two.level_calls == pytest.approx((0.0, 1 / steps, 1.0))
    assert two.tokens_per_step == pytest.approx(2 / steps)


def test_impossible_draft_lengths_are_one_sentence(measured):
    with pytest.raises(UserError, match="13 tokens is longer than the 12 tokens"):
        predict.predict(Selection((0,), (13,)), measured)
    with pytest.raises(UserError, match="level 0 would never draft"):
        predict.predict(Selection((0, 1), (4, 1)), measured)
    with pytest.raises(UserError, match="2 levels needs as many draft lengths, not 1"):
        Selection((0, 1), (4,))
