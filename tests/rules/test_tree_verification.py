"""verify_tree against its exact distribution, drawing of siblings, and odd rows."""

import numpy as np
import pytest
import torch
from oracle.distributions import tree_distribution
from support.exact_joint_distribution import chi_square_p_value

from vllm_hsd.rules import Tree, draw_iid, draw_without_replacement, verify_chain, verify_tree

V = 5
METHODS = ["traversal", "recursive_rejection"]


def rows(count: int, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(count, V, generator=gen, dtype=torch.float64)).softmax(-1)


# Two drafts of the root draw the same token (0 and 2), each with a child.
TREE = Tree([-1, -1, -1, 0, 2, 1, 3], [3, 1, 3, 0, 2, 1, 4])


@pytest.mark.parametrize("method", METHODS)
def test_samples_follow_the_distribution(method):
    target, draft = rows(8, 1), rows(7, 2)
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
    target, draft = rows(8, 1), rows(7, 2)
    target[1], draft[1] = torch.nan, torch.nan
    for uniforms in np.random.default_rng(0).random((50, 8)):
        # The root keeps its first child, which has neither children nor a token after it.
        tokens, path = verify_tree(target, draft, TREE, uniforms, method=method)
        chain, accepted = verify_chain(target[:1].repeat(2, 1), draft[:1], [3], uniforms[[7, 0]])
        assert len(path) == accepted
        assert tokens == ([3] if path else chain)


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


def test_nodes_of_a_tree_are_named():
    with pytest.raises(ValueError, match="parents has 1 entries, tokens 2"):
        Tree([-1], [1, 2])
    with pytest.raises(ValueError, match=r"parents\[1\] is 1"):
        Tree([-1, 1], [1, 2])
