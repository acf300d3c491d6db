"""Randomized quantiles, and the tests of them: error rate, power, places in steps."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from vllm_hsd.tools.audit.quantiles import token_ranges
from vllm_hsd.tools.audit.statistics import adjusted, alike, arrange, checks_of, improbable

ANSWER = 64


def test_ranges_are_those_of_the_sorted_distribution():
    logits = torch.tensor([[0.0, 2.0, -float("inf"), 2.0, 1.0]])
    probs = logits.softmax(-1)[0].double().numpy()
    by_rank = [1, 3, 4, 0, 2]
    for token in range(5):
        own, before, above, tail = token_ranges(logits, torch.tensor([token]))[0].tolist()
        assert own == pytest.approx(probs[token])
        assert before == pytest.approx(probs[:token].sum(), abs=1e-7)
        earlier = by_rank[: by_rank.index(token)]
        assert above == pytest.approx(probs[earlier].sum(), abs=1e-7)
        assert tail == pytest.approx(probs[probs <= probs[token]].sum(), abs=1e-7)


def answers(rng, count: int, continues):
    """Uniform quantiles; `continues(u, place)` says whether the step goes on after a token."""
    quantiles, lengths = [], []
    for _ in range(count):
        own = rng.random((2, ANSWER))
        steps = [1]
        for i in range(1, ANSWER):
            if i > 1 and steps[-1] < 5 and continues(own[0, i - 1], steps[-1]):
                steps[-1] += 1
            else:
                steps.append(1)
        quantiles.append(own)
        lengths.append(steps)
    return quantiles, lengths


def test_p_values_are_uniform_though_steps_end_by_their_tokens():
    rng = np.random.default_rng(2)
    p_values, least = [], []
    for _ in range(60):
        found = checks_of("", arrange(*answers(rng, 64, lambda u, place: u < 0.7)))
        p_values += [test.p_value for test in found]
        least.append(min(adjusted(p_values[-len(found) :])))
    shares = [np.mean(np.array(p_values) < level) for level in (0.5, 0.1, 0.01)]
    assert shares == pytest.approx([0.5, 0.1, 0.01], rel=0.3)
    assert np.mean(np.array(least) < 0.2) < 0.4


def test_a_detectable_shift_is_found():
    rng = np.random.default_rng(3)
    significance = 1e-6
    found = 0
    for _ in range(20):
        quantiles, lengths = answers(rng, 64, lambda u, place: u < 0.7)
        test = checks_of("", arrange(quantiles, lengths))[0]
        moved = test.detectable(significance)
        for own in quantiles:
            below = own < 0.5
            own[below & (rng.random(own.shape) < 2 * moved)] += 0.5
        found += checks_of("", arrange(quantiles, lengths))[0].p_value < significance
    assert found >= 19


def test_dependent_neighbours_are_found_though_each_is_uniform():
    rng = np.random.default_rng(4)
    quantiles, lengths = answers(rng, 64, lambda u, place: rng.random() < 0.5)
    for own in quantiles:
        for i in range(1, ANSWER):
            if rng.random() < 0.3:
                own[:, i] = own[:, i - 1]
    found = checks_of("", arrange(quantiles, lengths))
    at_fault = {test.hypothesis for test in found if test.p_value < 1e-8}
    assert at_fault == {"independent of the token before"}


def test_what_a_step_tells_about_the_next_one_is_found():
    rng = np.random.default_rng(5)
    quantiles, lengths = answers(rng, 128, lambda u, place: rng.random() < 0.5)
    for own, steps in zip(quantiles, lengths, strict=True):
        starts = list(itertools.accumulate(steps))[:-1]
        for start, length in zip(starts[1:], steps[1:], strict=False):
            if length in (1, 2):  # low after a step of one token, high after one of two
                own[:, start] = (own[:, start] + (length == 2)) / 2
    found = checks_of("", arrange(quantiles, lengths))
    assert min(t.p_value for t in found if t.hypothesis == "independent of the step before") < 1e-8


def test_answers_are_alike_though_their_tokens_tell_how_many_places_a_draft_reaches():
    """A lookup that finds little, whose drafts go on while its tokens are accepted."""
    rng, number = np.random.default_rng(8), 2048
    drawn, going = rng.random((ANSWER, number)), np.zeros(number, bool)
    reached = []
    for own in drawn:
        going |= rng.random(number) < 0.05
        reached.append(going)
        going = going & (own < 0.5)
    answer, place = np.array(reached).T.nonzero()
    quantiles = drawn.T[answer, place]
    (sound,) = alike("", "lookup", quantiles, answer)
    odd = np.where(answer % 8, quantiles, quantiles**4)
    (broken,) = alike("", "lookup", odd, answer)
    assert sound.p_value > 0.01 and broken.p_value < 1e-9
    assert 0 < broken.detectable(1e-6) < 0.5 and broken.num_tokens <= len(answer)
    few = answer < 3
    assert alike("", "lookup", quantiles[few], answer[few]) == []


def test_a_few_tokens_that_cannot_be_are_found_and_chance_is_not():
    rng = np.random.default_rng(7)
    found = [improbable("", rng.random(4096), exact=True).p_value for _ in range(200)]
    assert np.mean(np.array(found) < 0.05) <= 0.05 and min(found) > 1e-4
    tails = rng.random(4096)
    tails[:2] = 1e-12
    check = improbable("", tails, exact=True)
    assert check.p_value < 1e-9 and check.detectable(1e-6) < 0.01
    assert improbable("", tails, exact=False).p_value > check.p_value


def test_what_is_said_to_be_found_of_improbable_tokens_is_found():
    """Of the strictest threshold alone; as many events as a Poisson count of that mean has mostly.

    The test looks at four thresholds, for which it pays: a single event in 1024 tokens is not
    enough for a hundred checks.
    """
    count, significance = 1024, 1e-4 / 100
    least = improbable("", np.full(count, 0.5), exact=True).detectable(significance)
    events = int(stats.poisson.ppf(0.011, least * count))
    tails = np.full(count, 0.5)
    tails[:events] = 1e-10
    assert events > 1 and improbable("", tails, exact=True).p_value < significance
