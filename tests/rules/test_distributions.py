"""The samplers' exact distributions in float64 against the enumerated ones in fractions.

The enumeration itself is shown to be lossless in tests/oracle/test_chain_exact.py and
test_tree_exact.py, so equality with it is the proof for `vllm_hsd.rules`.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch
from oracle import exact, sequential
from oracle.distributions import chain_distribution, tree_distribution
from oracle.exact import ArgmaxOf, Table
from oracle.trees import DRAWS, grow, iid, top_k

from vllm_hsd.rules import Tree, verify_tree
from vllm_hsd.rules.residual import prefix_acceptance

CHAIN = {"block": sequential.block, "standard": sequential.standard}
TREE = {
    "traversal": sequential.traversal,
    "recursive_rejection": sequential.recursive_rejection,
}


def tensor(rows) -> torch.Tensor:
    return torch.tensor([[float(v) for v in row] for row in rows], dtype=torch.float64)


def drafts(q, n: int):
    """Every draft of q with its probability."""
    return q.joint(n).items()


@pytest.mark.parametrize("method", CHAIN)
@pytest.mark.parametrize("one_hot", [False, True], ids=["rows", "one-hot"])
@pytest.mark.parametrize(("vocabulary", "n"), [(2, 4), (3, 3), (4, 2), (2, 1)])
def test_chain_distribution_equals_the_enumerated_one(method, one_hot, vocabulary, n):
    p, q = Table(vocabulary, 1, zeros=2), Table(vocabulary, 101, zeros=2)
    q = ArgmaxOf(q) if one_hot else q
    for x, _ in drafts(q, n):
        rows = p.rows(x, n + 1), q.rows(x, n)
        enumerated = exact.distribution_of(
            lambda c, r=rows, x=x: CHAIN[method](*r, x, c.bernoulli, c.sample)
        )
        distribution = chain_distribution(
            tensor(rows[0]),
            None if one_hot else tensor(rows[1]),
            torch.tensor(x),
            method=method,
        )
        expected = torch.zeros(n + 1, vocabulary, dtype=torch.float64)
        for place, weight in enumerated.items():
            expected[place] = float(weight)
        torch.testing.assert_close(distribution, expected, rtol=0, atol=1e-14)


def test_empty_slot_ends_the_draft():
    p, q = Table(3, 1), Table(3, 101)
    target, draft = tensor(p.rows((0, 1, 2), 4)), tensor(q.rows((0, 1, 2), 3))
    whole = chain_distribution(target, draft, torch.tensor([0, -1, 2]))
    short = chain_distribution(target[:2], draft[:1], torch.tensor([0]))
    torch.testing.assert_close(whole[:2], short)
    assert whole[2:].count_nonzero() == 0


def as_tensors(root: sequential.Node):
    """(tree, target rows, proposal rows, path -> first node) of a tree of `sequential.Node`."""
    parents, tokens, target, draft = [], [], [root.p], []
    paths = {(): -1}

    def add(node, path):
        mine = []
        for token, row, child in node.children:
            parents.append(paths[path])
            tokens.append(token)
            target.append(child.p)
            draft.append(row)
            if (*path, token) not in paths:
                paths[(*path, token)] = len(tokens) - 1
                mine.append((child, (*path, token)))
        for child, below in mine:
            add(child, below)

    add(root, ())
    return Tree(parents, tokens), tensor(target), tensor(draft), paths


@pytest.mark.parametrize("method", TREE)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(("vocabulary", "widths"), [(3, (2, 2)), (4, (3,)), (2, (3, 1))])
def test_tree_distribution_equals_the_enumerated_one(method, draw, vocabulary, widths):
    p, q = Table(vocabulary, 1), Table(vocabulary, 101)
    trees = [
        grow(p, q, draw, widths, exact.Choices(script)) for script in scripts(p, q, draw, widths)
    ]
    for root in trees[:40]:
        enumerated = exact.distribution_of(
            lambda c, r=root: tuple(TREE[method](r, c.bernoulli, c.sample))
        )
        tree, target, draft, paths = as_tensors(root)
        distribution = tree_distribution(
            target, None if draw is top_k else draft, tree, method=method
        )
        expected = torch.zeros(len(tree) + 1, vocabulary, dtype=torch.float64)
        for tokens, weight in enumerated.items():
            expected[paths[tokens[:-1]] + 1, tokens[-1]] = float(weight)
        torch.testing.assert_close(distribution, expected, rtol=0, atol=1e-14)


def scripts(p, q, draw, widths) -> list[list[int]]:
    """The choices behind every tree that can be drawn, in a fixed shuffled order."""
    todo, done = [[]], []
    while todo:
        choices = exact.Choices(todo.pop(len(todo) // 2))
        grow(p, q, draw, widths, choices)
        done.append(choices.taken)
        todo += choices.others
    return done


def test_greedy_follows_the_argmax_path_of_a_tree():
    root = grow(Table(3, 1), Table(3, 101), iid, (3, 2), exact.Choices())
    tree, target, _, _ = as_tensors(root)
    tokens, _ = verify_tree(target, None, tree, method="greedy")
    assert tokens.tolist() == sequential.greedy_tree(root)


@pytest.mark.parametrize("method", CHAIN)
def test_prefix_acceptance_gives_the_mean_accepted_length(method):
    """1 + sum_t E[prefix acceptance of t] is the mean number of emitted tokens."""
    p, q, n = Table(3, 1), Table(3, 101), 3
    mean, enumerated = 0.0, Fraction(0)
    for x, weight in drafts(q, n):
        rows = p.rows(x, n + 1), q.rows(x, n)
        rho = [float(sequential.ratio(*row)) for row in zip(rows[0][:n], rows[1], x, strict=True)]
        a = prefix_acceptance(np.array(rho), method=method)
        mean += float(weight) * (1 + float((a.cumprod() if method == "standard" else a).sum()))
        outcomes = exact.distribution_of(
            lambda c, r=rows, x=x: CHAIN[method](*r, x, c.bernoulli, c.sample)
        )
        enumerated += weight * sum((tau + 1) * part for (tau, _), part in outcomes.items())
    assert mean == pytest.approx(float(enumerated), abs=1e-12)
