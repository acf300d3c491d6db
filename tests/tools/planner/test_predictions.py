"""Predicted latency against cascades that run on counted time, and against closed forms."""

from itertools import product

import numpy as np
import pytest
from support.marks import slow_but
from support.simulated_serving import Drafter, Guess, Serving

from benchmarks.paper_tables import closed_forms, paper_instance
from vllm_hsd.cascade.counters import Count
from vllm_hsd.errors import UserError
from vllm_hsd.tools.planner import optimize, predict
from vllm_hsd.tools.planner.latencies import Latencies, LatencyTable
from vllm_hsd.tools.planner.predict import Measured, Selection
from vllm_hsd.tools.planner.survival import Acceptance, independent_survival

LONGEST = 12
LOOKUP = 3  # index of the prompt lookup among the candidates


@pytest.fixture(scope="module")
def acceptance():
    """Drafters 0..2 with independent acceptance, a prompt lookup, and the target."""
    rates = [[1, 0.7, 0.6, 0, 0.5], [0.7, 1, 0.8, 0, 0.7], [0.6, 0.8, 1, 0, 0.85]]
    rates += [[0, 0, 0, 0, 0], [0.5, 0.7, 0.85, 0, 1]]
    survival = independent_survival(rates, LONGEST).copy()
    sizes = np.arange(LONGEST + 1)
    # The lookup has all the shares that a measurement can have.
    offered, accepted = np.tril_indices(len(sizes))
    joint = np.zeros((5, *[len(sizes)] * 4))
    shares = np.random.default_rng(0).dirichlet(np.ones(len(offered)), joint.shape[:3])
    joint[..., offered, accepted] = shares
    joint[-1] = joint[-1, :, :1]  # the same everywhere for the target
    reached = np.cumsum(joint.sum(-2)[..., ::-1], -1)[..., ::-1]
    survival[:, LOOKUP] = np.minimum(reached * (sizes <= sizes[:, None, None]), 1.0)
    return Acceptance(survival, {LOOKUP: joint})


def flat(acceptance, *ms):
    """Latencies that depend on nothing."""
    forward = [LatencyTable(batch_sizes=[1], tokens=[1], ms=[[x]]) for x in ms]
    return Measured(Latencies(forward=forward), acceptance, frozenset({LOOKUP}))


# Of the levels that run: ms of a forward pass over n tokens are base + slope * n.
COSTS = ((0.2, 0.02), (0.8, 0.05), (1.5, 0.1), (0.1, 0.0), (5.0, 0.2))
# How often each is right; the target always. A lookup finds something at a share of the places.
RATES, FOUND = (0.6, 0.8, 0.9, 0.7, 1.0), 0.6
CASCADES = {
    "one model": Selection((0,), (5,)),
    "two models": Selection((0, 1), (3, 8)),
    "three models": Selection((0, 1, 2), (3, 6, 12)),
    "a dearer drafter below": Selection((1, 2), (4, 2)),
    "a lookup": Selection((LOOKUP,), (6,)),
    "a lookup below a model": Selection((LOOKUP, 1), (5, 8)),
    "a lookup below two models": Selection((LOOKUP, 0, 2), (4, 6, 12)),
}


def linear(base, slope):
    """A forward pass of `Serving`'s levels, whose time depends on all its tokens together."""
    ms = [[base + slope * b * t for t in (1, 16)] for b in (1, 16)]
    return LatencyTable(batch_sizes=[1, 16], tokens=[1, 16], ms=ms)


class Padded(Drafter):
    """Its passes run over the whole batch, over as many tokens of each request as of any."""

    def forward(self, tokens, rows, starts, counts, num_logits):
        began = self.clock.now
        found = super().forward(tokens, rows, starts, counts, num_logits)
        self.clock.now = began + self.seconds(len(self.guesses) * int(counts.max()))
        return found


def served(model):
    """A level of `Serving`."""
    base, slope = COSTS[model]
    if model == LOOKUP:
        return Guess(RATES[model], FOUND, seconds=base)
    return Padded(RATES[model], lambda n: base + slope * n, sureness=0.0)


@pytest.fixture(scope="module")
def of_serving():
    """What a profile of these levels would hold."""
    # Two models agree where both are right or both are wrong: their wrong tokens are the same.
    right = np.array(RATES)
    agreed = np.outer(right, right) + np.outer(1 - right, 1 - right)
    joint = np.zeros((5, *[LONGEST + 1] * 4))
    joint[..., 0, 0] = 1 - FOUND
    for verifier in range(5):
        alike = right[LOOKUP] * right[verifier]
        gains = predict.gain_table(alike ** np.arange(LONGEST + 1))
        for n in range(1, LONGEST + 1):
            joint[verifier, n, :, n] = FOUND * gains[n]
    joint[:, 0, :, 0, 0] = 1.0
    acceptance = Acceptance(independent_survival(agreed, LONGEST), {LOOKUP: joint})
    forward = [linear(*costs) for costs in COSTS]
    return Measured(Latencies(forward=forward), acceptance, frozenset({LOOKUP}))


FAST = {*((name, 3) for name in CASCADES), ("two models", 8), ("a lookup below a model", 1)}


@pytest.mark.parametrize(("name", "batch"), slow_but(FAST, [*product(CASCADES, (1, 3, 8))]))
def test_the_prediction_is_the_mean_of_cascades_that_run(name, batch, of_serving):
    """A batch waits for its slowest request: its levels are called more often."""
    selection = CASCADES[name]
    predicted = predict.predict(selection, of_serving, batch=batch)
    base, slope = COSTS[-1]
    serving = Serving(
        lambda n: base + slope * n,
        [served(model) for model in selection.levels],
        batch,
        selection.draft_lengths,
        noise=0.0,
    )
    steps, parts = 120 // batch, 8
    seen = [batch / serving.run(steps) for _ in range(parts)]
    error = 4 * np.std(seen, ddof=1) / np.sqrt(parts)
    assert predicted.ms_per_token == pytest.approx(np.mean(seen), abs=error + 0.02 * seen[0])
    calls = serving.cascade.counts.rows[:, Count.forwards] / (steps * parts)
    first = int(selection.levels[0] == LOOKUP)
    assert predicted.level_calls[first:-1] == pytest.approx(calls[first:], rel=0.08)


def test_one_level_is_the_closed_form(acceptance):
    predicted = predict.predict(Selection((1,), (6,)), flat(acceptance, 0.1, 0.5, 1, 1, 5))
    closed = closed_forms.cascade_latency([0.5, 5], [0.7], [6])
    assert predicted.ms_per_token == pytest.approx(closed, rel=1e-12)
    assert predicted.tokens_per_step == pytest.approx(closed_forms.expected_tokens(0.7, 6))


@pytest.mark.parametrize("n", [2, 5, 8])
def test_a_lower_model_that_is_always_or_never_right(n):
    """All its drafts are accepted, or every token of the model above takes a pass; the last has no
    room for one."""
    for right, drafted, passes in ((1.0, n - 1, 1), (0.0, 1, n)):
        rates = [[1, right, 0.8 * right], [right, 1, 0.8], [0.8 * right, 0.8, 1]]
        found = flat(Acceptance(independent_survival(rates, LONGEST)), 0.03, 0.3, 1)
        step = 1 + passes * 0.3 + (n - 1) * 0.03
        predicted = predict.predict(Selection((0, 1), (drafted, n)), found)
        expected = step / closed_forms.expected_tokens(0.8, n)
        assert predicted.ms_per_token == pytest.approx(expected)


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


def test_finite_requests(of_serving):
    cascade = Selection((0, 1), (3, 8))
    endless = predict.predict(cascade, of_serving)
    long = predict.predict(cascade, of_serving, output_tokens=2000)
    assert long.ms_per_token == pytest.approx(endless.ms_per_token, rel=0.002)
    # One token to come: no draft. Two: the drafter cannot be asked, its verifier makes one.
    one = predict.predict(cascade, of_serving, output_tokens=2)
    assert one.level_calls == (0.0, 0.0, 1.0) and one.tokens_per_step == 1.0
    two = predict.predict(cascade, of_serving, output_tokens=3)
    steps = 1 * RATES[1] + 2 * (1 - RATES[1])
    assert two.level_calls == pytest.approx((0.0, 1 / steps, 1.0))
    assert two.tokens_per_step == pytest.approx(2 / steps)


def test_impossible_draft_lengths_are_one_sentence(of_serving):
    with pytest.raises(UserError, match="13 tokens is longer than the 12 tokens"):
        predict.predict(Selection((0,), (13,)), of_serving)
    with pytest.raises(UserError, match="level 0 would never draft"):
        predict.predict(Selection((0, 1), (4, 1)), of_serving)
    with pytest.raises(UserError, match="2 levels needs as many draft lengths, not 1"):
        Selection((0, 1), (4,))
