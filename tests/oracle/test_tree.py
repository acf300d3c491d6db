"""Exact law of tree verification, in fractions: K drafts from a row, each way of drawing them."""

from fractions import Fraction

import pytest
from oracle.exact import ArgmaxOf, Choices, Table, Tokens, distance, extended, law_of

from vllm_hsd.verify import naive

VERIFIERS = [naive.traversal, naive.recursive_rejection]


def iid(row, k: int, choices: Choices):
    """k independent draws: (token, row) pairs."""
    return [(choices.sample(row), row) for _ in range(k)]


def without_replacement(row, k: int, choices: Choices):
    """Up to k different tokens, each from the row without the earlier ones."""
    draws = []
    while len(draws) < k and sum(row) > 0:
        row = [w / sum(row) for w in row]
        draws.append((choices.sample(row), row))
        row = [0 if v == draws[-1][0] else w for v, w in enumerate(row)]
    return draws


def top_k(row, k: int, choices: Choices):
    """The k most likely tokens, each with a one-hot row."""
    best = sorted(range(len(row)), key=lambda v: -row[v])[:k]
    return [(v, [Fraction(v == u) for u in range(len(row))]) for v in best]


DRAWS = [iid, without_replacement, top_k]


def grow(p, q, draw, widths, choices: Choices, path: Tokens = ()) -> naive.Node:
    """A tree that draws widths[depth] children at each node; a token drawn twice has one node."""
    if not widths:
        return naive.Node(p(path))
    nodes, children = {}, []
    for token, row in draw(q(path), widths[0], choices):
        if token not in nodes:
            nodes[token] = grow(p, q, draw, widths[1:], choices, (*path, token))
        children.append((token, row, nodes[token]))
    return naive.Node(p(path), children)


def bias(p, depth: int, program) -> Fraction:
    return distance(extended(law_of(program), p, depth + 1), p.joint(depth + 1))


def call(p, q, draw, widths, verify):
    def program(choices: Choices) -> Tokens:
        root = grow(p, q, draw, widths, choices)
        return tuple(verify(root, choices.toss, choices.sample))

    return program


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(
    ("vocabulary", "widths"),
    [(3, (2,)), (4, (3,)), (2, (2, 2)), (3, (2, 2)), (3, (3, 1)), (2, (3, 2))],
)
def test_next_tokens_follow_the_target(verify, draw, vocabulary, widths):
    for seed in range(2):
        p, q = Table(vocabulary, seed), Table(vocabulary, seed + 100)
        assert bias(p, len(widths), call(p, q, draw, widths, verify)) == 0


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("draw", DRAWS)
def test_greedy_target_and_equal_models(verify, draw):
    model = Table(3, 7, zeros=3)
    for p, q in [(ArgmaxOf(model), Table(3, 8)), (model, model)]:
        assert bias(p, 2, call(p, q, draw, (2, 2), verify)) == 0


def test_a_chain_is_the_tree_with_one_child_everywhere():
    p, q = Table(3, 1), Table(3, 101)

    def chain(choices: Choices) -> Tokens:
        x: Tokens = ()
        for _ in range(3):
            x += (choices.sample(q(x)),)
        tau, y = naive.hierarchical(p.rows(x, 4), q.rows(x, 3), x, choices.toss, choices.sample)
        return (*x[:tau], y)

    assert law_of(chain) == law_of(call(p, q, iid, (1, 1, 1), naive.traversal))


def drawn_twice_but_offered_once(row, k: int, choices: Choices):
    """Drops a duplicate draw together with its residual."""
    draws = dict(iid(row, k, choices))
    return list(draws.items())


def likeliest_first(row, k: int, choices: Choices):
    """Shows the draws by falling probability in place of draw order."""
    return sorted(without_replacement(row, k, choices), key=lambda draw: -row[draw[0]])


def rows_of_first_draw(row, k: int, choices: Choices):
    """Draws without replacement but reports the full row for all."""
    return [(token, row) for token, _ in without_replacement(row, k, choices)]


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize(
    "draw", [drawn_twice_but_offered_once, likeliest_first, rows_of_first_draw]
)
def test_faulty_siblings_are_caught(verify, draw):
    p, q = Table(4, 1, zeros=0), Table(4, 101, zeros=0)
    assert bias(p, 1, call(p, q, draw, (2,), verify)) > Fraction(1, 1000)


def test_traversal_emits_more_than_recursive_rejection():
    p, q = Table(3, 1), Table(3, 101)
    mean = {}
    for verify in VERIFIERS:
        law = law_of(call(p, q, iid, (2, 2), verify))
        mean[verify] = sum(len(tokens) * weight for tokens, weight in law.items())
    assert mean[naive.traversal] > mean[naive.recursive_rejection]
