"""The samplers' exact distributions in float64 against the enumerated ones in fractions.

The enumeration itself is shown to be lossless in tests/oracle/test_chain_exact.py and
test_tree_exact.py, so equality with it is the proof for `vllm_hsd.rules`.
"""

import random

import pytest
import torch
from oracle import exact, sequential
from oracle.distributions import chain_distribution, tree_distribution
from oracle.exact import ArgmaxOf, Table
from oracle.trees import DRAWS, grow

from vllm_hsd.rules import Tree

CHAIN, TREE = ("block", "standard"), ("traversal", "recursive_rejection")


def tensor(rows) -> torch.Tensor:
    return torch.tensor([[float(v) for v in row] for row in rows], dtype=torch.float64)


def enumerated(method: str, *given) -> exact.Distribution:
    """Of what a sequential verifier makes of a chain's rows and tokens, or of a tree's root."""
    verify = getattr(sequential, method)
    return exact.distribution_of(lambda c: tuple(verify(*given, c.bernoulli, c.sample)))


@pytest.mark.parametrize("method", CHAIN)
@pytest.mark.parametrize("one_hot", [False, True], ids=["rows", "one-hot"])
@pytest.mark.parametrize(("vocabulary", "n"), [(2, 4), (3, 3), (4, 2), (2, 1)])
def test_chain_distribution_equals_the_enumerated_one(method, one_hot, vocabulary, n):
    p, q = Table(vocabulary, 1, zeros=2), Table(vocabulary, 101, zeros=2)
    q = ArgmaxOf(q) if one_hot else q
    for x in q.joint(n):
        target, draft = p.rows(x, n + 1), q.rows(x, n)
        distribution = chain_distribution(tensor(target), tensor(draft), x, method=method)
        expected = torch.zeros(n + 1, vocabulary, dtype=torch.float64)
        for place, weight in enumerated(method, target, draft, x).items():
            expected[place] = float(weight)
        torch.testing.assert_close(distribution, expected, rtol=0, atol=1e-14)


def as_tensors(root: sequential.Node):
    """(tree, target rows, proposal rows, path -> first node) of a tree of `sequential.Node`."""
    parents, tokens, target, draft = [], [], [root.p], []
    paths, todo = {(): -1}, [((), root)]
    for path, node in todo:
        for token, row, child in node.children:
            below = (*path, token)
            if below not in paths:
                paths[below] = len(tokens)
                todo.append((below, child))
            parents.append(paths[path])
            tokens.append(token)
            target.append(child.p)
            draft.append(row)
    return Tree(parents, tokens), tensor(target), tensor(draft), paths


@pytest.mark.parametrize("method", TREE)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(("vocabulary", "widths"), [(3, (2, 2)), (4, (3,)), (2, (3, 1))])
def test_tree_distribution_equals_the_enumerated_one(method, draw, vocabulary, widths):
    p, q = Table(vocabulary, 1), Table(vocabulary, 101)
    found = [*exact.distribution_of(lambda choices: grow(p, q, draw, widths, choices))]
    for root in random.Random(0).sample(found, min(len(found), 40)):
        tree, target, draft, paths = as_tensors(root)
        distribution = tree_distribution(target, draft, tree, method=method)
        expected = torch.zeros(len(tree) + 1, vocabulary, dtype=torch.float64)
        for tokens, weight in enumerated(method, root).items():
            expected[paths[tokens[:-1]] + 1, tokens[-1]] = float(weight)
        torch.testing.assert_close(distribution, expected, rtol=0, atol=1e-14)
