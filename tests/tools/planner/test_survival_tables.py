"""Survival along recorded text against the exact joint distribution of the verifiers."""

import itertools

import numpy as np
import pytest
import torch
from oracle.distributions import chain_distribution

from vllm_hsd.tools.planner import survival
from vllm_hsd.tools.planner.optimize import renewal


def markov_chains(rng, vocabulary=3, drift=0.6):
    """Transition tables float64 [V, V] of a drafter and of a target."""
    target, other = rng.dirichlet(np.full(vocabulary, 0.6), size=(2, vocabulary))
    return (1 - drift) * target + drift * other, target


def log_ratios(drafter, verifier, tokens):
    """log q(x) - log p(x) along texts, [texts, length]."""
    steps = tokens[:, :-1], tokens[:, 1:]
    return np.log(drafter[steps]) - np.log(verifier[steps])


def joint_distribution(p, q, n, verifier):
    """{(accepted, emitted tokens): P} of one round from state 0, by enumeration of all drafts.

    p, q: transition tables [V, V] with state 0 as the context.
    """
    joint: dict = {}
    for draft in itertools.product(range(len(p)), repeat=n):
        states = [0, *draft]
        rows, drawn = torch.from_numpy(p[states]), torch.from_numpy(q[states[:-1]])
        chance = np.prod([q[a, b] for a, b in itertools.pairwise(states)])
        found = chain_distribution(rows, drawn, torch.tensor(draft), method=verifier)
        for (kept, token), share in np.ndenumerate(found.numpy()):
            key = kept, (*draft[:kept], token)
            joint[key] = joint.get(key, 0.0) + chance * share
    return joint


@pytest.mark.parametrize("verifier", survival.VERIFIERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_accepted_length_given_the_text_is_the_survival_along_it(verifier, seed):
    q, p = markov_chains(np.random.default_rng(seed))
    n = 3
    joint = joint_distribution(p, q, n, verifier)
    for (kept, emitted), chance in joint.items():
        text = np.array([[0, *emitted]])
        ratios = survival.windows(log_ratios(q, p, text), n)
        alive = survival.survival_along(ratios, verifier)[0, 0]
        reached = alive[kept + 1] if kept < n else 0.0
        of_text = np.prod([p[a, b] for a, b in itertools.pairwise(text[0])])
        assert chance == pytest.approx(of_text * (alive[kept] - reached), abs=1e-12)


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


def test_block_verification_never_accepts_less():
    ratios = np.log(np.random.default_rng(2).uniform(0.2, 3, size=(50, 30)))
    better, worse = (
        survival.survival_along(survival.windows(ratios, 8), each) for each in survival.VERIFIERS
    )
    assert np.all(better >= worse - 1e-12)
