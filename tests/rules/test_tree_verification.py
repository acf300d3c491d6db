"""verify_tree against its exact distribution, drawing of siblings, and odd rows."""

import functools
from collections import Counter

import numpy as np
import pytest
import torch
from oracle import sequential
from oracle.distributions import tree_distribution
from rules.test_chain import quantile
from support.exact_joint_distribution import chi_square_p_value

from vllm_hsd.rules import Tree, draw_iid, draw_without_replacement, verify_chain, verify_tree
from vllm_hsd.rules.tree import ROOT

V = 5
METHODS = ["traversal", "recursive_rejection"]


def rows(count: int, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(count, V, generator=gen, dtype=torch.float64)).softmax(-1)


# Two drafts of the root draw the same token (0 and 2), each with a child.
TREE = Tree([-1, -1, -1, 0, 2, 1, 3], [3, 1, 3, 0, 2, 1, 4])


def random_tree(seed: int):
    """Of up to 8 nodes: rows, uniforms, some siblings with the same token."""
    rng, count = np.random.default_rng(seed), seed % 9
    target, draft = rows(count + 1, seed), rows(count, seed + 1000)
    parents = [int(rng.integers(-1, node)) for node in range(count)]
    tokens = [int(rng.choice(V, p=row.numpy())) for row in draft]
    return target, draft, Tree(parents, tokens), rng.random(count + 1).tolist()


class Visited(sequential.Node):
    """Puts itself on a stack when the verifier looks at its row."""

    def __init__(self, number: int, row: list[float], stack: list[int]) -> None:
        self.number, self.row, self.stack, self.children = number, row, stack, []

    @property
    def p(self) -> list[float]:
        self.stack.append(self.number)
        return self.row


def leaves_first(tree: Tree, uniforms: list[float], stack: list[int]):
    """A draw for the node that was visited last, which is then done with."""
    return lambda h: uniforms[stack.pop()] < h


def downwards(tree: Tree, uniforms: list[float], stack: list[int]):
    """Draws for one child after another, of the node that was accepted last."""
    children = iter(tree.children[ROOT])

    def bernoulli(h: float) -> bool:
        nonlocal children
        child = next(children)
        if accepted := uniforms[child] < h:
            children = iter(tree.children[tree.first[child]])
        return accepted

    return bernoulli


@pytest.mark.parametrize(
    ("method", "verify", "draws"),
    [
        ("traversal", sequential.traversal, leaves_first),
        ("recursive_rejection", sequential.recursive_rejection, downwards),
    ],
)
def test_equal_uniforms_give_equal_tokens(method, verify, draws):
    ends = Counter()
    for seed in range(400):
        target, draft, tree, uniforms = random_tree(seed)
        stack = []
        nodes = [Visited(n, row, stack) for n, row in enumerate(target.tolist(), ROOT)]
        for node, parent in enumerate(tree.parents):
            parent = parent if parent == ROOT else tree.first[parent]
            below = tree.tokens[node], draft[node].tolist(), nodes[tree.first[node] + 1]
            nodes[parent + 1].children.append(below)
        sample = functools.partial(quantile, u=uniforms[-1])
        expected = verify(nodes[0], draws(tree, uniforms, stack), sample)
        tokens, path = verify_tree(target, draft, tree, uniforms, method=method)
        assert tokens == expected
        ends[min(len(path), 3)] += 1
        ends["drawn twice"] += any(tree.first.count(node) > 1 for node in path)
        steps = zip([ROOT, *path], path, strict=False)
        ends["not the first"] += any(tree.children[above][0] != node for above, node in steps)
    assert min(ends[key] for key in (0, 1, 2, 3, "drawn twice", "not the first")) >= 10, ends


@pytest.mark.parametrize("method", METHODS)
def test_samples_follow_the_distribution(method):
    target, draft = rows(8, 2), rows(7, 1)
    rows_of_ends = tree_distribution(target, draft, TREE, method=method)
    distribution = {place: float(p) for place, p in np.ndenumerate(rows_of_ends.numpy()) if p > 0}
    rng, samples = np.random.default_rng(0), []
    for _ in range(4000):
        tokens, path = verify_tree(target, draft, TREE, rng.random(8), method=method)
        assert tokens[:-1] == [TREE.tokens[n] for n in path]
        samples.append((path[-1] + 1 if path else 0, tokens[-1]))
    assert chi_square_p_value(samples, distribution) > 1e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("first", "bad"), [(2, [torch.nan] * 2), (0, [-torch.inf] * V), (3, [torch.inf])]
)
def test_a_bad_root_row_gives_the_token_of_plain_sampling(method, first, bad):
    """vLLM: the argmax of softmax / exponential; NaN is largest."""
    logits = rows(8, 1)
    logits[0, first : first + len(bad)] = torch.tensor(bad)
    target = logits.softmax(-1)
    plain = target[0] / torch.empty(V).exponential_()
    found = verify_tree(target, rows(7, 2), TREE, [0.5] * 8, method=method)
    assert found == ([int(plain.argmax())], [])


@pytest.mark.parametrize("method", METHODS)
def test_invalid_rows_end_the_tree_there(method):
    target, draft, kept = rows(8, 2), rows(7, 1), []
    target[1], draft[1] = torch.nan, torch.nan
    for uniforms in np.random.default_rng(0).random((50, 8)):
        # If the root keeps its first child, that has neither children nor a token after it.
        tokens, path = verify_tree(target, draft, TREE, uniforms, method=method)
        chain, accepted = verify_chain(target[:1].repeat(2, 1), draft[:1], [3], uniforms[[7, 0]])
        assert len(path) == accepted
        assert tokens == ([3] if path else chain)
        kept.append(accepted)
    assert 5 < sum(kept) < 45


def test_draws_come_with_their_rows():
    row = torch.tensor([0.5, 0.0, 0.3, 0.2])
    tokens, drawn = draw_iid(row, [0.1, 0.9, 0.6])
    assert tokens == [0, 3, 2] and torch.equal(drawn, row.repeat(3, 1))
    tokens, drawn = draw_without_replacement(row, [0.7, 0.1, 0.9])
    assert tokens == [2, 0, 3]
    left = row.clone()
    for token, own in zip(tokens, drawn, strict=True):
        torch.testing.assert_close(own, left / left.sum())
        left[token] = 0
    with pytest.raises(ValueError, match="k is 4, but row has only 3 tokens"):
        draw_without_replacement(row, [0.5] * 4)


def test_methods_are_named():
    one = rows(1, 0)
    with pytest.raises(ValueError, match="method is 'greedy', must be one of block, standard"):
        verify_chain(one, one[:0], [], [0.5], method="greedy")
    with pytest.raises(ValueError, match="method is 'block', must be traversal or"):
        verify_tree(one, one[:0], Tree([], []), [0.5], method="block")


def test_nodes_of_a_tree_are_named():
    with pytest.raises(ValueError, match="parents has 1 entries, tokens 2"):
        Tree([-1], [1, 2])
    with pytest.raises(ValueError, match=r"parents\[1\] is 1"):
        Tree([-1, 1], [1, 2])
