"""Exact distribution of tree verification, in fractions, for each way of drawing siblings."""

from fractions import Fraction

import pytest
from oracle import sequential, test_chain_exact
from oracle.exact import ArgmaxOf, Choices, Table, Tokens, deviation, distribution_of
from oracle.test_chain_exact import draft
from oracle.trees import DRAWS, grow, iid, without_replacement

VERIFIERS = [sequential.traversal, sequential.recursive_rejection]


def call(p, q, draw, widths, verify):
    def program(choices: Choices) -> Tokens:
        root = grow(p, q, draw, widths, choices)
        return tuple(verify(root, choices.bernoulli, choices.sample))

    return program


def bias(p, q, draw, widths, verify) -> Fraction:
    return deviation(call(p, q, draw, widths, verify), p, len(widths) + 1)


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(
    ("vocabulary", "widths"),
    [(3, (2,)), (4, (3,)), (2, (2, 2)), (3, (2, 2)), (3, (3, 1)), (2, (3, 2))],
)
def test_next_tokens_follow_the_target(verify, draw, vocabulary, widths):
    for seed in range(2):
        p, q = Table(vocabulary, seed), Table(vocabulary, seed + 100)
        assert bias(p, q, draw, widths, verify) == 0


def chains(p, q, count: int, length: int, choices: Choices) -> sequential.Node:
    """Whole chains that are drawn independently; a first part that they share is one path."""
    nodes: dict[Tokens, sequential.Node] = {(): sequential.Node(p(()), [])}
    for _ in range(count):
        chain = draft(q, length, choices)
        for t in range(length):
            path = chain[: t + 1]
            node = nodes.setdefault(path, sequential.Node(p(path), []))
            nodes[path[:-1]].children.append((path[-1], q(path[:-1]), node))
    return nodes[()]


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize(("vocabulary", "count", "length"), [(2, 2, 2), (3, 2, 2), (2, 3, 2)])
def test_independent_chains(verify, vocabulary, count, length):
    p, q = Table(vocabulary, 1), Table(vocabulary, 101)

    def program(choices: Choices) -> Tokens:
        root = chains(p, q, count, length, choices)
        return tuple(verify(root, choices.bernoulli, choices.sample))

    assert deviation(program, p, length + 1) == 0


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("draw", DRAWS)
def test_greedy_target_and_equal_models(verify, draw):
    model = Table(3, 7, zeros=3)
    for p, q in [(ArgmaxOf(model), Table(3, 8)), (model, model)]:
        assert bias(p, q, draw, (2, 2), verify) == 0


def test_a_chain_is_the_tree_with_one_child_everywhere():
    p, q = Table(3, 1), Table(3, 101)
    chain = test_chain_exact.call(p, q, 3, sequential.block)
    tree = call(p, q, iid, (1, 1, 1), sequential.traversal)
    assert distribution_of(chain) == distribution_of(tree)


def drawn_twice_but_offered_once(row, k: int, choices: Choices):
    """Drops a duplicate draw together with its residual."""
    return list(dict(iid(row, k, choices)).items())


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
    assert bias(p, q, draw, (2,), verify) > Fraction(1, 1000)
