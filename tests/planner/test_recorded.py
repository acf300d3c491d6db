"""Survival along recorded text against the exact joint law of the verifiers."""

import itertools

import numpy as np
import pytest
from planner import toy

from vllm_hsd.planner import recorded
from vllm_hsd.planner.optimize import renewal


def joint_law(p, q, n, verifier):
    """{(accepted, emitted tokens): P} of one round from state 0, by enumerating drafts and coins.

    p, q: transition tables [V, V] with state 0 as the context.
    """
    law = {}
    size = len(p)
    for draft in itertools.product(range(size), repeat=n):
        states = (0, *draft)
        chance = np.prod([q[states[t], x] for t, x in enumerate(draft)])
        capped = [1.0]
        for t, x in enumerate(draft):
            capped.append(min(1.0, capped[-1] * p[states[t], x] / q[states[t], x]))
        if verifier == "standard":
            ratios = [min(1.0, p[states[t], x] / q[states[t], x]) for t, x in enumerate(draft)]
            stops = [np.prod(ratios[:k]) * (1 - ratios[k]) for k in range(n)]
            stops.append(np.prod(ratios))
            weights = [1.0] * (n + 1)
        else:
            success = [1.0]
            for t in range(1, n + 1):
                spare = np.maximum(capped[t] * p[states[t]] - q[states[t]], 0).sum()
                full = capped[t] == 1.0
                success.append(
                    capped[t] if t == n else 1.0 if full else spare / (spare + 1 - capped[t])
                )
            stops = [success[k] * np.prod([1 - h for h in success[k + 1 :]]) for k in range(n + 1)]
            weights = capped
        for kept in range(n + 1):
            row = p[states[kept]]
            if kept < n:
                row = np.maximum(weights[kept] * row - q[states[kept]], 0)
                row = row / row.sum() if row.sum() > 0 else row
            for y in range(size):
                key = kept, (*draft[:kept], y)
                law[key] = law.get(key, 0.0) + chance * stops[kept] * row[y]
    return law


@pytest.mark.parametrize("verifier", recorded.VERIFIERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_accepted_length_given_the_text_is_the_survival_along_it(verifier, seed):
    q, p = toy.chain_family(np.random.default_rng(seed), 2, vocabulary=3, drift=0.6)
    n = 3
    law = joint_law(p, q, n, verifier)
    for (kept, emitted), chance in law.items():
        text = np.array([[0, *emitted]])
        alive = recorded.survival_along(toy.log_ratios(q, p, text), n, verifier)[0, 0]
        reached = alive[kept + 1] if kept < n else 0.0
        of_text = np.prod([p[a, b] for a, b in itertools.pairwise(text[0])])
        assert chance == pytest.approx(of_text * (alive[kept] - reached), abs=1e-12)


@pytest.mark.parametrize("verifier", recorded.VERIFIERS)
def test_visited_survival_predicts_the_long_run(verifier):
    """Tokens per call along texts of p equal those of a world that really verifies."""
    rng = np.random.default_rng(5)
    q, p = toy.chain_family(rng, 2, drift=0.6)
    text = toy.sample_text(p, 400, 120, rng)
    table = recorded.visited_survival(toy.log_ratios(q, p, text), 6, verifier)
    for n in (1, 3, 6):
        world = toy.MarkovWorld([q, p], verifier, rng)
        gained = []
        for _ in range(6000):
            for _ in range(n):
                world.draft(np.ones((1, 1), dtype=bool))
            gained.append(world.verify_one(0, 1, n) + 1)
        error = 4 * np.std(gained) / np.sqrt(len(gained))
        assert table[n, : n + 1].sum() == pytest.approx(np.mean(gained), abs=error)


def test_equal_models_accept_everything_and_strangers_nothing():
    same = recorded.visited_survival(np.zeros((3, 20)), 4, "block")
    assert np.array_equal(same, np.tril(np.ones((5, 5))))
    never = recorded.visited_survival(np.full((3, 20), -np.inf), 4, "standard")
    assert np.array_equal(never[:, 1:], np.zeros((5, 4))) and np.all(never[:, 0] == 1)


def test_texts_of_different_lengths_and_leading_axes():
    rng = np.random.default_rng(0)
    ratios = np.log(rng.uniform(0.3, 1.5, size=(2, 4, 12)))
    ragged = np.concatenate([ratios, np.full((2, 4, 5), np.nan)], axis=-1)
    table = recorded.visited_survival(ratios, 5, "block")
    assert np.allclose(table, recorded.visited_survival(ragged, 5, "block"))
    assert np.allclose(table[1], recorded.visited_survival(ratios[1], 5, "block"))
    # No text is long enough for 5 tokens: what 3 tokens showed, and nothing beyond.
    short = recorded.visited_survival(ratios[..., :3], 5, "block")
    assert np.array_equal(short[:, 5, :4], short[:, 3, :4]) and np.all(short[:, 5, 4:] == 0)


def rounds_along(ratios, budget, wanted, verifier):
    """Mean rounds until `wanted` tokens of each text are made, counted text by text."""
    alive = recorded.survival_along(ratios, budget, verifier)
    started = np.zeros((len(ratios), wanted + 1))
    started[:, 0] = 1.0
    for have in range(wanted):
        asked = min(budget, wanted - have - 1)
        reached = np.append(alive[:, have, : asked + 1], np.zeros((len(ratios), 1)), axis=1)
        started[:, have + 1 : have + asked + 2] += started[:, have, None] * -np.diff(reached)
    return started[:, :wanted].sum(1).mean()


@pytest.mark.parametrize("verifier", recorded.VERIFIERS)
def test_survival_by_position_counts_the_rounds_along_the_texts_exactly(verifier):
    """Texts that differ in how well they are drafted, and get worse as they go on."""
    rng = np.random.default_rng(4)
    texts, longest = 60, 8
    falling = np.linspace(0.3, -2.5, longest) + rng.normal(0, 1, size=(texts, 1))
    ratios = falling + rng.normal(0, 0.3, size=(texts, longest))
    table = recorded.survival_by_position(ratios, longest, verifier)
    assert table.shape == (longest + 1, longest + 1, longest + 1)
    rounds = renewal(table, np.ones(longest + 1), capped=True)
    blind = np.repeat(recorded.visited_survival(ratios, longest, verifier)[:, None], 9, axis=1)
    without_position = renewal(blind, np.ones(longest + 1), capped=True)
    for budget in (1, 3, 7):
        for wanted in (2, 4, 8):
            exact = rounds_along(ratios, budget, wanted, verifier)
            assert rounds[budget - 1, wanted - 1] == pytest.approx(exact, abs=1e-12)
    # Negative control: one row for all positions.
    assert abs(without_position[0, 3] - rounds_along(ratios, 1, 4, verifier)) > 0.1


def test_survival_by_position_of_texts_that_end_early():
    ratios = np.full((2, 4), -np.inf)
    ratios[1, 2:] = np.nan
    table = recorded.survival_by_position(ratios, 4, "block")
    assert np.all(table[:, :, 1:] == 0) and np.all(table[:, :, 0] == 1)
    shorter = recorded.survival_by_position(np.zeros((3, 2)), 4, "block")
    assert shorter[1, 0].tolist() == [1, 1, 0, 0, 0]
    assert shorter[4, 0].tolist() == shorter[2, 0].tolist() == [1, 1, 1, 0, 0]


def test_sequence_level_never_accepts_less():
    ratios = np.log(np.random.default_rng(2).uniform(0.2, 3, size=(50, 30)))
    better = recorded.survival_along(ratios, 8, "block")
    worse = recorded.survival_along(ratios, 8, "standard")
    assert np.all(better >= worse - 1e-12)
