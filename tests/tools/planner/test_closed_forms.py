"""Closed forms against simulation, enumeration and the papers' own special cases."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.exact import distance, distribution_of, extended
from oracle.sequential import standard

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


@given(rates, rates, counts, counts)
def test_interleaved_speedup_is_that_of_the_chances_of_its_tokens(alpha, beta, m, n):
    medium, small = 0.2, 0.1
    tokens = 1 + np.tile([beta] * n + [alpha], m).cumprod().sum()
    time = 1 + m * medium + m * n * medium * small
    found = closed_forms.interleaved_speedup(alpha, beta, m, n, medium, small)
    assert found == pytest.approx(tokens / time)


def test_interleaved_rule_as_printed_is_biased_and_its_correction_is_not():
    """Printed, the first rejected token stays, and the next is drawn from p."""
    drawn = np.random.default_rng(3).dirichlet(np.full(3, 0.5), size=3)
    p, medium, small = ([Fraction(x) for x in row] for row in drawn)
    rows = [small, medium, small, medium]  # m = 2, n = 1

    def call(choices, printed=False):
        draft = tuple(choices.sample(q) for q in rows)
        kept, token = standard([p] * 5, rows, draft, choices.bernoulli, choices.sample)
        return draft[: kept + 1] if printed else (*draft[:kept], token)

    def bias(emitted):
        texts, truth = (extended(each, lambda text: p, 5) for each in (emitted, {(): Fraction(1)}))
        return distance(texts, truth)

    fixed = distribution_of(call)
    assert bias(fixed) < 1e-12
    assert bias(distribution_of(partial(call, printed=True))) > 0.2
    alpha, beta = (float(sum(map(min, p, q))) for q in (medium, small))
    tokens = float(sum(len(text) * chance for text, chance in fixed.items()))
    assert tokens == pytest.approx(closed_forms.interleaved_tokens(alpha, beta, 2, 1))
