"""Closed forms against simulation, enumeration and the papers' own special cases."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paper_tables import closed_forms

rates = st.floats(0.0, 1.0)
counts = st.integers(1, 8)


def rounds_by_enumeration(rate, draft_tokens, wanted):
    """Expected rounds from the full distribution of what has been produced after each round."""
    produced, total = {0: 1.0}, 0.0
    while produced:
        total += sum(produced.values())
        after = {}
        for have, chance in produced.items():
            for kept in range(draft_tokens + 1):
                stop = 1.0 if kept == draft_tokens else 1.0 - rate
                if have + kept + 1 < wanted:
                    state = have + kept + 1
                    after[state] = after.get(state, 0.0) + chance * rate**kept * stop
        produced = after
    return total


@given(rates, counts, st.integers(1, 20))
def test_expected_rounds_is_the_renewal_expectation(rate, draft_tokens, wanted):
    expected = rounds_by_enumeration(rate, draft_tokens, wanted)
    assert closed_forms.expected_rounds(rate, draft_tokens, wanted) == pytest.approx(expected)


def test_interleaved_speedup_against_simulated_calls():
    rng = np.random.default_rng(0)
    alpha, beta, m, n, medium, small = 0.8, 0.7, 3, 2, 0.2, 0.1
    chances = np.tile([beta] * n + [alpha], m)
    accepted = (rng.random((200_000, len(chances))) < chances).cumprod(1).sum(1)
    time = 1 + m * medium + m * n * medium * small
    speedup = closed_forms.interleaved_speedup(alpha, beta, m, n, medium, small)
    assert (accepted + 1).mean() / time == pytest.approx(speedup, rel=0.005)


def interleaved_distribution(p, rows, lossless):
    """Exact distribution of the tokens of one interleaved call, continued by p to full length.

    p: distribution of every next token [V] (context-free models); rows [n, V]: distribution that
    each draft token is drawn from. The printed rule keeps the first rejected token and
    draws the next from p.
    Returns ({tokens: P}, expected accepted + 1).
    """
    size, length = len(p), len(rows) + 1
    joint, tokens = {}, 0.0

    def emit(prefix, chance):
        prefix = prefix[:length]
        for rest in itertools.product(range(size), repeat=length - len(prefix)):
            text = prefix + rest
            joint[text] = joint.get(text, 0.0) + chance * np.prod([p[x] for x in rest])

    for draft in itertools.product(range(size), repeat=len(rows)):
        chance = np.prod([rows[t][x] for t, x in enumerate(draft)])
        for t, x in enumerate(draft):
            accept = min(1.0, p[x] / rows[t][x])
            rejected = chance * (1 - accept)
            tokens += rejected * (t + 1)
            if lossless:
                residual = np.maximum(p - rows[t], 0)
                residual /= max(residual.sum(), 1e-300)
                for y in range(size):
                    emit((*draft[:t], y), rejected * residual[y])
            else:
                emit(draft[: t + 1], rejected)
            chance *= accept
        tokens += chance * (len(rows) + 1)
        emit(draft, chance)
    return joint, tokens


def test_interleaved_rule_as_printed_is_biased_and_its_correction_is_not():
    rng = np.random.default_rng(3)
    p, medium, small = rng.dirichlet(np.full(3, 0.5), size=3)
    rows = [small, medium, small, medium]  # m = 2, n = 1
    truth = {text: np.prod([p[x] for x in text]) for text in itertools.product(range(3), repeat=5)}

    def distance(joint):
        return 0.5 * sum(abs(joint[text] - truth[text]) for text in truth)

    fixed, fixed_tokens = interleaved_distribution(p, rows, lossless=True)
    printed, _ = interleaved_distribution(p, rows, lossless=False)
    assert distance(fixed) < 1e-12
    assert distance(printed) > 0.2
    alpha, beta = np.minimum(p, medium).sum(), np.minimum(p, small).sum()
    assert fixed_tokens == pytest.approx(closed_forms.interleaved_tokens(alpha, beta, 2, 1))
