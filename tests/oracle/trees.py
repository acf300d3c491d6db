"""Ways to draw a tree, as programs over exact choices."""

from fractions import Fraction

from oracle import sequential
from oracle.exact import Choices, Tokens


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
    return [(v, one_hot(v, len(row))) for v in best]


def one_hot(token: int, vocabulary: int) -> list[Fraction]:
    """The row of a point mass."""
    return [Fraction(token == v) for v in range(vocabulary)]


DRAWS = [iid, without_replacement, top_k]


def grow(p, q, draw, widths, choices: Choices, path: Tokens = ()) -> sequential.Node:
    """A tree that draws widths[depth] children at each node; a token drawn twice has one node."""
    if not widths:
        return sequential.Node(p(path))
    nodes, children = {}, []
    for token, row in draw(q(path), widths[0], choices):
        if token not in nodes:
            nodes[token] = grow(p, q, draw, widths[1:], choices, (*path, token))
        children.append((token, row, nodes[token]))
    return sequential.Node(p(path), children)
