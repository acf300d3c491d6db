"""Survival along recorded text against the exact joint distribution of the verifiers."""

import itertools

import numpy as np
import pytest
from oracle import sequential
from oracle.exact import Table, distribution_of

from vllm_hsd.tools.planner import survival
from vllm_hsd.tools.planner.optimize import renewal


@pytest.mark.parametrize("verifier", survival.VERIFIERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_accepted_length_given_the_text_is_the_survival_along_it(verifier, seed):
    """In a round between Markov chains, from state 0."""
    tables = Table(3, 2 * seed, zeros=0), Table(3, 2 * seed + 1, zeros=0)
    p, q = ([table((state,)) for state in range(3)] for table in tables)
    target, drafter, n = np.array(p, dtype=float), np.array(q, dtype=float), 3

    def round_(choices):
        states = [0]
        for _ in range(n):
            states.append(choices.sample(q[states[-1]]))
        rows = [p[state] for state in states], [q[state] for state in states[:-1]]
        verify = getattr(sequential, verifier)
        kept, token = verify(*rows, states[1:], choices.bernoulli, choices.sample)
        return kept, (*states[1 : kept + 1], token)

    joint = distribution_of(round_)
    for kept in range(n + 1):
        for emitted in itertools.product(range(3), repeat=kept + 1):
            steps = (0, *emitted[:-1]), emitted
            ratios = np.log(drafter[steps]) - np.log(target[steps])
            alive = survival.survival_along(survival.windows(ratios[None], n), verifier)[0, 0]
            reached = alive[kept + 1] if kept < n else 0.0
            expected = target[steps].prod() * (alive[kept] - reached)
            assert float(joint.get((kept, emitted), 0)) == pytest.approx(expected, abs=1e-12)


ONE = np.ones((1, 1, 1))


def rounds_along(ratios, length, wanted, verifier):
    """Mean rounds until `wanted` tokens of each text are made, counted text by text."""
    alive = survival.survival_along(survival.windows(ratios, length), verifier)
    started = np.zeros((len(ratios), wanted + 1))
    started[:, 0] = 1.0
    for have in range(wanted):
        asked = min(length, wanted - have - 1)
        reached = np.append(alive[:, have, : asked + 1], np.zeros((len(ratios), 1)), axis=1)
        started[:, have + 1 : have + asked + 2] += started[:, have, None] * -np.diff(reached)
    return started[:, :wanted].sum(1).mean()


@pytest.mark.parametrize("verifier", survival.VERIFIERS)
def test_survival_by_position_counts_the_rounds_along_the_texts_exactly(verifier):
    """Texts that differ in how well they are drafted, and get worse as they go on."""
    rng = np.random.default_rng(4)
    texts, longest = 60, 8
    falling = np.linspace(0.3, -2.5, longest) + rng.normal(0, 1, size=(texts, 1))
    ratios = falling + rng.normal(0, 0.3, size=(texts, longest))
    drafts = survival.windows(ratios, longest)
    table = survival.survival_table(drafts, verifier, by_position=True)
    assert table.shape == (longest + 1, longest + 1, longest + 1)
    rounds = renewal(table, ONE, capped=True)
    blind = survival.survival_table(drafts, verifier, by_position=False)
    without_position = renewal(blind, ONE, capped=True)
    for n in (1, 3, 7):
        for wanted in (2, 4, 8):
            exact = rounds_along(ratios, n, wanted, verifier)
            assert rounds[n - 1, wanted - 1] == pytest.approx(exact, abs=1e-12)
    # Negative control: one row for all positions.
    assert abs(without_position[0, 3] - rounds_along(ratios, 1, 4, verifier)) > 0.1
