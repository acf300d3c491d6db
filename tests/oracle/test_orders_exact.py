"""Which orders of the vocabulary `verify` may use: exact distributions of quantiles, in fractions.

Given the text before a place that a step reaches, the token there follows the target. So its
quantile is uniform in every order that is a function of that text: of the drafter's distribution
there, and of the offered token where that is a function of the text, as a lookup's is. A *drawn*
token is none: it is accepted more often than not.
"""

from collections import defaultdict
from fractions import Fraction

import pytest
from oracle import biased_rules, sequential
from oracle.exact import ArgmaxOf, Choices, Table, distribution_of
from oracle.test_chain_exact import draft

N = 3
TARGET, DRAFTER = Table(3, 1, zeros=0), Table(3, 101, zeros=0)

# Each: (target row, drafter's row, offered token or None) -> keys, the smallest comes first.
ORDERS = {
    "token id": lambda p, q, offered: range(len(p)),
    "falling probability": lambda p, q, offered: [-each for each in p],
    "ratio": lambda p, q, offered: [-b / a for a, b in zip(p, q, strict=True)],
    "drafter's probability": lambda p, q, offered: [-each for each in q],
    "offered first": lambda p, q, offered: [v != offered for v in range(len(p))],
}


def deviations(p, q, verify, order) -> dict[int, Fraction]:
    """Place of a step -> largest distance of the quantiles' distribution from the uniform one."""

    def program(choices: Choices):
        x = draft(q, N, choices)
        rows = p.rows(x, N + 1), q.rows(x, N)
        tau, y = verify(*rows, x, choices.bernoulli, choices.sample)
        return x, (*x[:tau], y)

    pieces = defaultdict(list)
    for (x, emitted), weight in distribution_of(program).items():
        for t, token in enumerate(emitted):
            offered = x[t] if t < N else None
            row = p(emitted[:t])
            keys = list(order(row, q(emitted[:t]), offered))
            before = sum(
                (row[v] for v in range(len(row)) if (keys[v], v) < (keys[token], token)),
                Fraction(0),
            )
            pieces[t].append((before, row[token], weight))
    found = {}
    for t, own in pieces.items():
        total = sum(weight for *_, weight in own)
        edges = {edge for before, size, _ in own for edge in (before, before + size)}
        found[t] = max(
            abs(
                sum(w * min(max(edge - before, 0), size) / size for before, size, w in own) / total
                - edge
            )
            for edge in edges
        )
    return found


SOUND = [sequential.block, sequential.standard]
FAULTY = biased_rules.BLOCK | biased_rules.STANDARD


@pytest.mark.parametrize("verify", SOUND)
@pytest.mark.parametrize("order", [name for name in ORDERS if name != "offered first"])
def test_quantiles_are_uniform_in_orders_that_know_the_past(verify, order):
    found = deviations(TARGET, DRAFTER, verify, ORDERS[order])
    assert len(found) == N + 1 and not any(found.values())


@pytest.mark.parametrize("verify", SOUND)
def test_the_offered_token_may_come_first_if_the_text_decides_it(verify):
    lookup = ArgmaxOf(DRAFTER)
    assert not any(deviations(TARGET, lookup, verify, ORDERS["offered first"]).values())


@pytest.mark.parametrize("verify", SOUND)
def test_the_offered_token_may_not_come_first_if_it_was_drawn(verify):
    found = deviations(TARGET, DRAFTER, verify, ORDERS["offered first"])
    assert all(found[t] > Fraction(1, 100) for t in range(N))


@pytest.mark.parametrize("fault", FAULTY)
def test_the_ratio_shows_faulty_rules(fault):
    found = deviations(TARGET, DRAFTER, FAULTY[fault], ORDERS["ratio"])
    assert max(found.values()) > Fraction(1, 1000)
