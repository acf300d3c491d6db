"""Exact distribution of one and two verification calls on a chain, in fractions."""

from fractions import Fraction

import pytest
from oracle import biased_rules, sequential
from oracle.exact import ArgmaxOf, Choices, Table, Tokens, TopOf, deviation

VERIFIERS = [sequential.block, sequential.standard]
P, Q = Table(3, 1), Table(3, 101)
LEAST = Fraction(1, 1000)


def draft(q, n: int, choices: Choices, ends=None, drops: bool = False) -> Tokens:
    """Up to n tokens of q; ends: by a row, before the draw, or by a token, which it may drop."""
    x: Tokens = ()
    for _ in range(n):
        row = q(x)
        if ends and ends(row, None):
            break
        token = choices.sample(row)
        done = ends and ends(row, token)
        if done and drops:
            break
        x += (token,)
        if done:
            break
    return x


def call(p, q, n: int, verify, *, rows=None, **how):
    """One verification call as a program; ``rows`` are the proposals that the verifier is given."""

    def program(choices: Choices) -> Tokens:
        x = draft(q, n, choices, **how)
        claimed = (rows or q).rows(x, len(x))
        tau, y = verify(p.rows(x, len(x) + 1), claimed, x, choices.bernoulli, choices.sample)
        return (*x[:tau], y)

    return program


def bias(p, q, n: int, verify, **how) -> Fraction:
    """Total variation between the next n + 1 tokens and the target's."""
    return deviation(call(p, q, n, verify, **how), p, n + 1)


@pytest.mark.parametrize(("vocabulary", "n"), [(2, 1), (2, 4), (3, 2), (3, 4), (4, 3)])
@pytest.mark.parametrize("verify", VERIFIERS)
def test_next_tokens_follow_the_target(verify, vocabulary, n):
    for seed in range(3):
        assert bias(Table(vocabulary, seed), Table(vocabulary, seed + 100), n, verify) == 0


MODEL, OTHER = Table(3, 7, zeros=3), Table(3, 8, zeros=3)
WIDE, FILTERED = Table(4, 101), TopOf(Table(4, 1), 2)


PAIRS = {
    "p=q": (MODEL, MODEL),
    "masked tokens": (MODEL, OTHER),
    "one-hot draft": (MODEL, ArgmaxOf(OTHER)),
    "greedy target": (ArgmaxOf(MODEL), OTHER),
    "both one-hot": (ArgmaxOf(MODEL), ArgmaxOf(OTHER)),
    "filtered target": (FILTERED, WIDE),
    "draft of another filter": (FILTERED, TopOf(WIDE, 3)),
}


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("pair", PAIRS)
def test_degenerate_rows(verify, pair):
    assert bias(*PAIRS[pair], 3, verify) == 0


def unlikely_token(row, token) -> bool:
    return token is not None and row[token] < Fraction(2, 5)


def uncertain_row(row, token) -> bool:
    return token is None and max(row) < Fraction(1, 2)


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("ends", [unlikely_token, uncertain_row])
@pytest.mark.parametrize(("vocabulary", "n"), [(2, 4), (3, 3)])
def test_draft_length_may_be_a_stopping_time(verify, ends, vocabulary, n):
    assert bias(Table(vocabulary, 1), Table(vocabulary, 101), n, verify, ends=ends) == 0


@pytest.mark.parametrize("verify", VERIFIERS)
def test_look_and_drop_is_caught(verify):
    assert bias(P, Q, 3, verify, ends=unlikely_token, drops=True) > LEAST


def one_uniform_for_all_places(p, q, x, bernoulli, sample):
    return sequential.block(p, q, x, lambda h: bernoulli(h, "shared"), sample)


FAULTY = biased_rules.BLOCK | {"one uniform for all places": one_uniform_for_all_places}


@pytest.mark.parametrize("fault", FAULTY)
def test_faulty_rules_are_caught(fault):
    assert bias(P, Q, 3, FAULTY[fault]) > LEAST


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize(
    ("p", "q", "drafter"),
    [(P, Q, Q.tempered(2)), (FILTERED, WIDE, TopOf(WIDE, 2))],
    ids=["raw rows of tempered drafts", "unfiltered rows of filtered drafts"],
)
def test_rows_that_were_not_drawn_from_are_caught(verify, p, q, drafter):
    assert bias(p, drafter, 3, verify) == 0
    assert bias(p, drafter, 3, verify, rows=q) > LEAST


def invalid(context: Tokens) -> bool:
    """Whether the target's row counts as invalid there."""
    return context[-1:] == (1,) and len(context) % 2 == 0


def cut(x: Tokens, keeps: bool) -> Tokens:
    """The draft up to the token that leads to an invalid target row, which it keeps or not."""
    return next((x[: t - 1 + keeps] for t in range(1, len(x) + 1) if invalid(x[:t])), x)


@pytest.mark.parametrize("verify", VERIFIERS)
def test_invalid_target_row_ends_the_draft_after_its_token(verify):
    def found(keeps: bool) -> Fraction:
        def program(choices: Choices) -> Tokens:
            x = cut(draft(Q, 3, choices), keeps)
            rows = P.rows(x, len(x) + 1), Q.rows(x, len(x))
            tau, y = verify(*rows, x, choices.bernoulli, choices.sample)
            return x[:tau] if invalid(x[:tau]) else (*x[:tau], y)

        return deviation(program, P, 4)

    assert found(keeps=True) == 0
    assert found(keeps=False) > LEAST


def bias_of_two_calls(verify, *, by_position: bool) -> Fraction:
    """Of two calls in a row, with fresh uniforms or with uniforms keyed by absolute position."""
    p, q, n = Table(2, 1), Table(2, 101), 2

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

    return deviation(lambda choices: one(choices, one(choices, ())), p, 4)


def test_uniforms_keyed_by_position_are_caught_over_two_calls():
    for verify in VERIFIERS:
        assert bias_of_two_calls(verify, by_position=False) == 0
    # Standard verification never reads past its first rejection, so there the keys do no harm.
    assert bias_of_two_calls(sequential.standard, by_position=True) == 0
    assert bias_of_two_calls(sequential.block, by_position=True) > LEAST
