"""Tree kernels against the reference, and their contract."""

import pytest
import torch
from support.kernel_batches import UNUSABLE_ROWS, make_trees
from support.proposal_states import poison_memory

from vllm_hsd.kernels import naive as reference
from vllm_hsd.kernels.tree_verify import verify_tree

INF = float("inf")
CHUNK_AND_BLOCK = 32, 16


def assert_matches(batch, **options):
    result = verify_tree(**batch, **options)
    expected = reference.verify_tree(**batch, **options)
    torch.testing.assert_close(result, expected, check_dtype=False)
    return result


@pytest.mark.every_kernel
def test_random_trees(small_blocks, monkeypatch):
    """Also where memory that is read before it is written holds anything."""
    batch = make_trees(5, 70)
    poison_memory(monkeypatch)
    result = assert_matches(batch, level=1)
    assert result.num_accepted.max() > 1


@pytest.mark.parametrize(
    ("batch", "small"),
    [
        (make_trees(2, 1, (-1, -1, 0), dtype=torch.bfloat16), False),
        (make_trees(2, 2048, (-1, -1, 0), dtype=torch.float16), False),
        (make_trees(6, 50, (-1, 0, 1, 2), seed=4), True),
        # I.i.d. siblings over four tokens repeat themselves: a repeat only leaves its residual.
        (make_trees(10, 4, (-1,) * 6, seed=5), True),
        (make_trees(2, 40, tuple((i - 3) // 3 if i >= 3 else -1 for i in range(64)), seed=2), True),
    ],
    ids=["one token", "whole blocks", "a chain", "duplicate draws", "64 nodes"],
)
def test_shapes_of_trees(batch, small, request):
    if small:
        request.getfixturevalue("small_blocks")
    assert_matches(batch)


def test_duplicate_draws_with_children(small_blocks):
    """A token that was drawn again is not tried again once its children were refused."""
    batch = make_trees(40, 4, parents=(-1, -1, -1, 0, 0, 0), seed=6)
    batch["tokens"][:, 1:3] = batch["tokens"][:, :1]
    assert_matches(batch)


def test_degenerate_trees(small_blocks):
    """Invalid rows, empty slots, tokens outside the vocabulary, a separate draft temperature."""
    batch = make_trees(20, 70, seed=1)
    batch["temperature"] = torch.full((20,), 0.9)
    target, draft, tokens = (batch[k] for k in ("target_logits", "draft_logits", "tokens"))
    for change, tree in zip(UNUSABLE_ROWS.values(), (0, 8, 9), strict=True):
        change(target[tree, :1])
    target[1, 1] = float("nan")
    target[range(10, 20), [1, 2, 3, 4, 5] * 2] = float("nan")
    target[2, 9] = -INF
    draft[3, 4, 3] = INF
    draft[4, 3] = float("nan")  # a leaf's proposal row is never read
    tokens[5, [1, 3]] = -1
    tokens[6, 0] = 70
    target[7, :, 10:] = -INF
    draft[7, :, :10] = -INF
    draft_temperature = torch.full((20,), 0.9)
    draft_temperature[4] = 0.5
    result = assert_matches(batch, draft_temperature=draft_temperature)
    assert result.token_ids[[0, 8, 9]].tolist() == [[0] + [-1] * 10] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_logits": torch.zeros(2, 4)}, "target_logits must have 3 dimensions"),
        ({"target_logits": torch.zeros(2, 66, 8)}, "2 to 65 rows"),
        ({"draft_logits": torch.zeros(2, 3, 8)}, r"draft_logits must be a contiguous \[2, 4, 8\]"),
        ({"tokens": torch.zeros(2, 4, dtype=torch.int64)}, r"tokens must have shape \[2, 3\]"),
        ({"parents": torch.zeros(2, 3)}, "parents must be int64 or int32"),
        ({"seeds": torch.zeros(3, dtype=torch.int64)}, r"seeds must have shape \[2\]"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        verify_tree(**make_trees(2, 8, parents=(-1, -1, -1)) | change)
