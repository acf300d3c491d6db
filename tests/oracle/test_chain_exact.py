"""Exact distribution of one and two verification calls on a chain, in fractions."""

from collections import defaultdict
from fractions import Fraction

import pytest
from oracle import biased_rules, sequential
from oracle.exact import (
    ArgmaxOf,
    Choices,
    Table,
    Tokens,
    TopOf,
    deviation,
    distance,
    distribution_of,
    extended,
)

SIZES = [(2, 1), (2, 4), (3, 2), (3, 4), (4, 3)]
VERIFIERS = [sequential.block, sequential.standard]


def draft(q, n: int, choices: Choices, stop=None) -> Tokens:
    """Up to n tokens of q; ``stop(row, token)`` is called after each draw, and before it with None.

    It returns "keep", "last" or "drop".
    """
    x: Tokens = ()
    for _ in range(n):
        row = q(x)
        if stop and stop(row, None) == "last":
            break
        token = choices.sample(row)
        decision = stop(row, token) if stop else "keep"
        if decision == "drop":
            break
        x += (token,)
        if decision == "last":
            break
    return x


def call(p, q, n: int, verify, *, rows=None, stop=None):
    """One verification call as a program; ``rows`` are the proposals that the verifier is given."""

    def program(choices: Choices) -> Tokens:
        x = draft(q, n, choices, stop=stop)
        claimed = (rows or q).rows(x, len(x))
        tau, y = verify(p.rows(x, len(x) + 1), claimed, x, choices.bernoulli, choices.sample)
        return (*x[:tau], y)

    return program


def bias(p, n: int, program) -> Fraction:
    """Total variation between the next n + 1 tokens and the target's."""
    return deviation(program, p, n + 1)


@pytest.mark.parametrize(("vocabulary", "n"), SIZES)
@pytest.mark.parametrize("verify", VERIFIERS)
def test_next_tokens_follow_the_target(verify, vocabulary, n):
    for seed in range(3):
        p, q = Table(vocabulary, seed), Table(vocabulary, seed + 100)
        assert bias(p, n, call(p, q, n, verify)) == 0


MODEL, OTHER = Table(3, 7, zeros=3), Table(3, 8, zeros=3)


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize(
    ("p", "q"),
    [
        (MODEL, MODEL),
        (MODEL, OTHER),
        (MODEL, ArgmaxOf(OTHER)),
        (ArgmaxOf(MODEL), OTHER),
        (ArgmaxOf(MODEL), ArgmaxOf(OTHER)),
    ],
    ids=["p=q", "masked tokens", "one-hot draft", "greedy target", "both one-hot"],
)
def test_degenerate_rows(verify, p, q):
    assert bias(p, 3, call(p, q, 3, verify)) == 0


def own_probability_kept(row, token):
    """Ends after an unlikely token, which remains in the draft."""
    return "last" if token is not None and row[token] < Fraction(2, 5) else "keep"


def own_probability_dropped(row, token):
    """Ends before an unlikely token, having looked at it."""
    return "drop" if token is not None and row[token] < Fraction(2, 5) else "keep"


def uncertain_row(row, token):
    """Ends where the row has no likely token, before it draws one."""
    return "last" if token is None and max(row) < Fraction(1, 2) else "keep"


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("stop", [own_probability_kept, uncertain_row])
@pytest.mark.parametrize(("vocabulary", "n"), [(2, 4), (3, 3)])
def test_draft_length_may_be_a_stopping_time(verify, stop, vocabulary, n):
    p, q = Table(vocabulary, 1), Table(vocabulary, 101)
    assert bias(p, n, call(p, q, n, verify, stop=stop)) == 0


@pytest.mark.parametrize("verify", VERIFIERS)
def test_look_and_drop_is_caught(verify):
    p, q = Table(3, 1), Table(3, 101)
    assert bias(p, 3, call(p, q, 3, verify, stop=own_probability_dropped)) > Fraction(1, 1000)


@pytest.mark.parametrize("fault", biased_rules.BLOCK)
def test_faulty_rules_are_caught(fault):
    p, q = Table(3, 1), Table(3, 101)
    assert bias(p, 3, call(p, q, 3, biased_rules.BLOCK[fault])) > Fraction(1, 1000)


def test_one_shared_uniform_is_caught():
    def verify(p, q, x, bernoulli, sample):
        return sequential.block(p, q, x, lambda h: bernoulli(h, "shared"), sample)

    p, q = Table(3, 1), Table(3, 101)
    assert bias(p, 3, call(p, q, 3, verify)) > Fraction(1, 1000)


@pytest.mark.parametrize("verify", VERIFIERS)
def test_raw_rows_for_tempered_drafts_are_caught(verify):
    p, q = Table(3, 1), Table(3, 101)
    assert bias(p, 3, call(p, q.tempered(2), 3, verify)) == 0
    assert bias(p, 3, call(p, q.tempered(2), 3, verify, rows=q)) > Fraction(1, 1000)


@pytest.mark.parametrize("verify", VERIFIERS)
def test_filtered_drafts_are_verified_against_filtered_rows(verify):
    """Drafts of another filter, or of none, are as lossless: it is their own rows that count."""
    p, q = TopOf(Table(4, 1), 2), Table(4, 101)
    for drafter in (TopOf(q, 2), TopOf(q, 3), q):
        assert bias(p, 3, call(p, drafter, 3, verify)) == 0
    assert bias(p, 3, call(p, TopOf(q, 2), 3, verify, rows=q)) > Fraction(1, 1000)


def invalid(context: Tokens) -> bool:
    """Whether the target's row counts as invalid there."""
    return context[-1:] == (1,) and len(context) % 2 == 0


def cut_after(x: Tokens) -> Tokens:
    """The draft up to and with the token that leads to an invalid target row."""
    return next((x[:t] for t in range(1, len(x) + 1) if invalid(x[:t])), x)


def cut_before(x: Tokens) -> Tokens:
    """The draft up to and without that token."""
    return next((x[: t - 1] for t in range(1, len(x) + 1) if invalid(x[:t])), x)


@pytest.mark.parametrize("verify", VERIFIERS)
def test_invalid_target_row_ends_the_draft_after_its_token(verify):
    p, q, n = Table(3, 1), Table(3, 101), 3

    def program(cut):
        def call(choices: Choices) -> Tokens:
            x = cut(draft(q, n, choices))
            tau, y = verify(
                p.rows(x, len(x) + 1), q.rows(x, len(x)), x, choices.bernoulli, choices.sample
            )
            return x[:tau] if invalid(x[:tau]) else (*x[:tau], y)

        return call

    assert bias(p, n, program(cut_after)) == 0
    assert bias(p, n, program(cut_before)) > Fraction(1, 1000)


def two_calls(p, q, n: int, verify, *, by_position: bool):
    """Two calls in a row, with fresh uniforms or with uniforms keyed by absolute position."""

    def one(choices: Choices, emitted: Tokens) -> Tokens:
        def keys(purpose: str):
            return iter([(purpose, len(emitted) + t) if by_position else None for t in range(n)])

        x: Tokens = ()
        for key in keys("draft"):
            x += (choices.sample(q(emitted + x), key),)
        accept = keys("accept")
        target, drawn = p.rows(x, n + 1, emitted), q.rows(x, n, emitted)
        tau, y = verify(
            target, drawn, x, lambda h: choices.bernoulli(h, next(accept)), choices.sample
        )
        return (*emitted, *x[:tau], y)

    return lambda choices: one(choices, one(choices, ()))


def test_uniforms_keyed_by_position_are_caught_over_two_calls():
    p, q = Table(2, 1), Table(2, 101)
    for verify in VERIFIERS:
        assert bias(p, 3, two_calls(p, q, 2, verify, by_position=False)) == 0
    # Standard verification never reads past its first rejection, so there the keys do no harm.
    assert bias(p, 3, two_calls(p, q, 2, sequential.standard, by_position=True)) == 0
    keyed = two_calls(p, q, 2, sequential.block, by_position=True)
    assert bias(p, 3, keyed) > Fraction(1, 1000)


@pytest.mark.parametrize("verify", VERIFIERS)
def test_drafts_past_the_end_token_change_nothing_before_it(verify):
    p, q, n, end = Table(3, 1), Table(3, 101), 3, 2

    def cut(distribution):
        result = defaultdict(Fraction)
        for tokens, weight in distribution.items():
            result[tokens[: (*tokens, end).index(end) + 1]] += weight
        return result

    distribution = extended(distribution_of(call(p, q, n, verify)), p, n + 1)
    assert distance(cut(distribution), cut(p.joint(n + 1))) == 0


def test_block_accepts_more_than_standard():
    p, q = Table(3, 1), Table(3, 101)
    mean = {}
    for verify in VERIFIERS:
        distribution = distribution_of(call(p, q, 3, verify))
        mean[verify] = sum(len(tokens) * weight for tokens, weight in distribution.items())
    assert mean[sequential.block] > mean[sequential.standard]
