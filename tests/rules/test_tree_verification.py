"""verify_tree against its exact distribution, drawing of siblings, and odd input."""

import numpy as np
import pytest
import torch
from oracle.distributions import tree_distribution
from support.exact_joint_distribution import chi_square_p_value
from support.marks import slow

from vllm_hsd.rules import Tree, draw_iid, draw_without_replacement, verify_chain, verify_tree

V = 5
METHODS = ["traversal", "recursive_rejection"]


def rows(count: int, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(count, V, generator=gen, dtype=torch.float64)).softmax(-1)


# Two drafts of the root draw the same token (0 and 2), each with a child.
TREE = Tree([-1, -1, -1, 0, 2, 1, 3], [3, 1, 3, 0, 2, 1, 4])


@pytest.mark.parametrize("one_hot", [False, *slow(True)], ids=["rows", "one-hot"])
@pytest.mark.parametrize("method", METHODS)
def test_samples_follow_the_distribution(method, one_hot):
    target, draft = rows(8, 1), None if one_hot else rows(7, 2)
    rows_of_ends = tree_distribution(target, draft, TREE, method=method)
    distribution = {place: float(p) for place, p in np.ndenumerate(rows_of_ends.numpy()) if p > 0}
    gen, samples = torch.Generator().manual_seed(0), []
    for _ in range(4000):
        tokens, path = verify_tree(target, draft, TREE, method=method, generator=gen)
        assert tokens[:-1].tolist() == [TREE.tokens[n] for n in path]
        samples.append((int(path[-1]) + 1 if len(path) else 0, int(tokens[-1])))
    assert chi_square_p_value(samples, distribution) > 1e-6


@pytest.mark.parametrize("path", [[1, 5], [0, 4]], ids=["one draft", "a token drawn twice"])
def test_greedy_follows_the_argmax(path):
    target, tokens = rows(8, 1), [TREE.tokens[node] for node in path]
    for node, token in zip([-1, *path], [*tokens, 4], strict=True):
        target[node + 1, token] = 9
    for last in (4, 0):
        found = verify_tree(target, None, TREE, method="greedy")
        assert [each.tolist() for each in found] == [[*tokens, last], path]
        target[path[-1] + 1, 0] = torch.nan


@pytest.mark.parametrize("method", [*METHODS, "greedy"])
@pytest.mark.parametrize(
    ("first", "bad"), [(2, [torch.nan] * 2), (0, [-torch.inf] * V), (3, [torch.inf])]
)
def test_a_bad_root_row_gives_the_token_of_plain_sampling(method, first, bad):
    """vLLM: the argmax of softmax / exponential, or of the logits when greedy; NaN is largest."""
    logits = rows(8, 1)
    logits[0, first : first + len(bad)] = torch.tensor(bad)
    target = logits if method == "greedy" else logits.softmax(-1)
    plain = target[0] if method == "greedy" else target[0] / torch.empty(V).exponential_()
    tokens, path = verify_tree(target, rows(7, 2), TREE, method=method)
    assert tokens[0] == plain.argmax()
    if method != "greedy":
        assert len(tokens) == 1 and len(path) == 0


@pytest.mark.parametrize("method", METHODS)
def test_invalid_rows_end_the_tree_there(method):
    target, draft = rows(8, 1), rows(7, 2)
    target[1], draft[1] = torch.nan, torch.nan
    drawn = torch.rand(50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for uniforms in drawn:
        # The root keeps its first child, which has neither children nor a token after it.
        tokens, path = verify_tree(target, draft, TREE, method=method, uniforms=uniforms)
        token = torch.tensor([3])
        chain = verify_chain(
            target[:1].repeat(2, 1), draft[:1], token, [1], uniforms=uniforms[[7, 0]]
        )
        assert len(path) == int(chain.num_accepted)
        assert tokens.tolist() == ([3] if len(path) else chain.token_ids[0, :1].tolist())


def test_draws_come_with_their_rows():
    row = torch.tensor([0.5, 0.0, 0.3, 0.2])
    gen = torch.Generator().manual_seed(0)
    tokens, drawn = draw_iid(row, 3, gen)
    assert tokens.shape == (3,) and torch.equal(drawn, row.repeat(3, 1))
    tokens, drawn = draw_without_replacement(row, 3, gen)
    assert sorted(tokens.tolist()) == [0, 2, 3]
    left = row.clone()
    for token, own in zip(tokens.tolist(), drawn, strict=True):
        torch.testing.assert_close(own, left / left.sum())
        left[token] = 0
    with pytest.raises(ValueError, match="k is 4, but row has only 3 tokens"):
        draw_without_replacement(row, 4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Tree([-1], [1, 2]), "parents has 1 entries, tokens 2"),
        (lambda: Tree([-1, 1], [1, 2]), r"parents\[1\] is 1"),
        (lambda: verify_tree(rows(7, 1), None, TREE), r"target_probs must have shape \[8, V\]"),
        (lambda: verify_tree(*[rows(8, 1)] * 2, TREE), r"draft_probs must have shape \[7, V\]"),
        (lambda: verify_tree(rows(8, 1), rows(7, 1).float(), TREE), "draft_probs .* not match"),
        (lambda: verify_tree(rows(2, 1), None, Tree([-1], [V])), r"tree.tokens\[0\] is 5, outside"),
        (lambda: verify_tree(rows(2, 1), None, Tree([-1], [-1])), r"tree.tokens\[0\] is -1"),
        (lambda: verify_tree(rows(8, 1), None, TREE, method="block"), "method must be one of"),
    ],
)
def test_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
