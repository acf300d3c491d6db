"""The torch laws against the fractions, and the law of the target recovered from them."""

from fractions import Fraction

import pytest
import torch
from oracle import exact
from oracle.exact import ArgmaxOf, Table
from oracle.trees import DRAWS, grow, iid, top_k

from vllm_hsd.verify import Tree, chain_distribution, expected_tokens, naive, tree_distribution

CHAIN = {"block": naive.hierarchical, "standard": naive.tokenwise, "greedy": naive.greedy}
TREE = {"traversal": naive.traversal, "recursive_rejection": naive.recursive_rejection}


def tensor(rows) -> torch.Tensor:
    return torch.tensor([[float(v) for v in row] for row in rows], dtype=torch.float64)


def drafts(q, n: int):
    """Every draft of q with its probability."""
    return q.joint(n).items()


@pytest.mark.parametrize("method", CHAIN)
@pytest.mark.parametrize(("vocabulary", "n"), [(2, 4), (3, 3), (4, 2), (2, 1)])
def test_chain_law_equals_the_enumerated_one(method, vocabulary, n):
    p, q = Table(vocabulary, 1, zeros=2), Table(vocabulary, 101, zeros=2)
    for x, _ in drafts(q, n):
        rows = p.rows(x, n + 1), q.rows(x, n)
        enumerated = exact.law_of(lambda c, r=rows, x=x: CHAIN[method](*r, x, c.toss, c.sample))
        law = chain_distribution(tensor(rows[0]), tensor(rows[1]), torch.tensor(x), method=method)
        expected = torch.zeros(n + 1, vocabulary, dtype=torch.float64)
        for place, weight in enumerated.items():
            expected[place] = float(weight)
        torch.testing.assert_close(law, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("one_hot", [False, True], ids=["rows", "one-hot"])
@pytest.mark.parametrize("method", ["block", "standard"])
def test_chain_is_lossless_in_float64(method, one_hot):
    vocabulary, n = 3, 3
    p, q = Table(vocabulary, 2), Table(vocabulary, 102)
    q = ArgmaxOf(q) if one_hot else q
    emitted: exact.Law = {}
    for x, weight in drafts(q, n):
        target = tensor(p.rows(x, n + 1))
        law = chain_distribution(
            target, None if one_hot else tensor(q.rows(x, n)), torch.tensor(x), method=method
        )
        for t in range(n + 1):
            for y in range(vocabulary):
                block = (*x[:t], y)
                emitted[block] = emitted.get(block, 0.0) + float(weight) * float(law[t, y])
    emitted = {block: weight for block, weight in emitted.items() if weight}
    assert exact.distance(exact.extended(emitted, p, n + 1), p.joint(n + 1)) < 1e-12


def test_empty_slot_ends_the_draft():
    p, q = Table(3, 1), Table(3, 101)
    target, draft = tensor(p.rows((0, 1, 2), 4)), tensor(q.rows((0, 1, 2), 3))
    whole = chain_distribution(target, draft, torch.tensor([0, -1, 2]))
    short = chain_distribution(target[:2], draft[:1], torch.tensor([0]))
    torch.testing.assert_close(whole[:2], short)
    assert whole[2:].count_nonzero() == 0


def as_tensors(root: naive.Node):
    """(tree, target rows, proposal rows, path -> first node) of a tree of naive nodes."""
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
def test_tree_law_equals_the_enumerated_one(method, draw, vocabulary, widths):
    p, q = Table(vocabulary, 1), Table(vocabulary, 101)
    trees = [
        grow(p, q, draw, widths, exact.Choices(script)) for script in scripts(p, q, draw, widths)
    ]
    for root in trees[:40]:
        enumerated = exact.law_of(lambda c, r=root: tuple(TREE[method](r, c.toss, c.sample)))
        tree, target, draft, paths = as_tensors(root)
        law = tree_distribution(target, None if draw is top_k else draft, tree, method=method)
        expected = torch.zeros(len(tree) + 1, vocabulary, dtype=torch.float64)
        for tokens, weight in enumerated.items():
            expected[paths[tokens[:-1]] + 1, tokens[-1]] = float(weight)
        torch.testing.assert_close(law, expected, rtol=0, atol=1e-14)


def scripts(p, q, draw, widths) -> list[list[int]]:
    """The choices behind every tree that can be drawn, in a fixed shuffled order."""
    todo, done = [[]], []
    while todo:
        choices = exact.Choices(todo.pop(len(todo) // 2))
        grow(p, q, draw, widths, choices)
        done.append(choices.taken)
        todo += choices.others
    return done


@pytest.mark.parametrize("method", TREE)
def test_tree_is_lossless_in_float64(method):
    p, q, widths = Table(3, 2), Table(3, 102), (2, 1)
    emitted: exact.Law = {}
    for script in scripts(p, q, iid, widths):
        choices = exact.Choices(script)
        tree, target, draft, paths = as_tensors(grow(p, q, iid, widths, choices))
        law = tree_distribution(target, draft, tree, method=method)
        for path, node in paths.items():
            for y in range(3):
                block = (*path, y)
                weight = float(choices.weight) * float(law[node + 1, y])
                emitted[block] = emitted.get(block, 0.0) + weight
    emitted = {block: weight for block, weight in emitted.items() if weight}
    assert exact.distance(exact.extended(emitted, p, 3), p.joint(3)) < 1e-12


def test_greedy_tree_law_is_the_argmax_path():
    root = grow(Table(3, 1), Table(3, 101), iid, (3, 2), exact.Choices())
    tree, target, draft, paths = as_tensors(root)
    tokens = naive.greedy_tree(root)
    law = tree_distribution(target, draft, tree, method="greedy")
    assert law.sum() == 1
    assert law[paths[tuple(tokens[:-1])] + 1, tokens[-1]] == 1


@pytest.mark.parametrize("method", ["block", "standard"])
def test_expected_tokens_is_the_mean_of_the_law(method):
    p, q, n = Table(3, 1), Table(3, 101), 3
    rho, weights = [], []
    for x, weight in drafts(q, n):
        rows = zip(p.rows(x, n), q.rows(x, n), x, strict=True)
        rho.append([float(naive.ratio(*row)) for row in rows])
        weights.append(weight)
    counts = [int(w * 10**6) for w in weights]
    samples = torch.tensor(rho, dtype=torch.float64).repeat_interleave(torch.tensor(counts), dim=0)
    tokens = expected_tokens(samples, method=method)
    assert tokens.shape == (n + 1,)
    for length in range(n + 1):
        mean = Fraction(0)
        for x, weight in drafts(q, length):
            law = exact.law_of(
                lambda c, x=x, k=length: CHAIN[method](
                    p.rows(x, k + 1), q.rows(x, k), x, c.toss, c.sample
                )
            )
            mean += weight * sum((tau + 1) * part for (tau, _), part in law.items())
        # The samples stand for the drafts to 1e-6 each.
        assert float(tokens[length]) == pytest.approx(float(mean), abs=1e-3)


@pytest.mark.parametrize("name", ["target_probs", "draft_probs"])
@pytest.mark.parametrize("fault", [float("nan"), -0.1, 2.0])
def test_laws_refuse_rows_that_are_not_laws(name, fault):
    rows = {"target_probs": torch.full((3, 4), 0.25), "draft_probs": torch.full((2, 4), 0.25)}
    rows[name][1, 2] = fault
    with pytest.raises(ValueError, match=f"{name} row 1 "):
        chain_distribution(**rows, draft_token_ids=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=f"{name} row 1 "):
        tree_distribution(**rows, tree=Tree([-1, -1], [0, 1]))


def test_expected_tokens_names_the_bad_row():
    with pytest.raises(ValueError, match="rho row 1"):
        expected_tokens(torch.tensor([[1.0, 0.5], [-1.0, 1.0]]))
    with pytest.raises(ValueError, match="shape"):
        expected_tokens(torch.ones(3))
