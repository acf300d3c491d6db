"""On a CPU the scheduler is told how long each draft is."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_hsd.host.draft_lengths import get_draft_tokens


@pytest.mark.parametrize(
    ("branches", "handed_over"),
    [
        (None, [[-1] * 3, [], []]),
        (SimpleNamespace(listed=np.array([0, 2])), [[-1] * 2, [], []]),
        (SimpleNamespace(listed=None), [[-1] * 4] * 3),
    ],
    ids=["drafts", "lists of trees, which end where the last branch does", "whole trees"],
)
def test_placeholders_are_cut_to_what_was_drafted(branches, handed_over):
    """Of three requests in slots 4, 0 and 2; the second has no draft."""
    rows = torch.tensor([-1, -1, 0, -1, 1], dtype=torch.int32)
    state = SimpleNamespace(row_of_slot=rows, draft_length=torch.tensor([0, 3]))
    runner = SimpleNamespace(
        speculator=SimpleNamespace(state=state, branches=branches),
        req_states=SimpleNamespace(req_id_to_index={"a": 4, "b": 0, "c": 2}),
    )
    drafts = SimpleNamespace(req_ids=["a", "b", "c"], draft_token_ids=[[-1] * 4 for _ in "abc"])
    assert get_draft_tokens(lambda: drafts, runner).draft_token_ids == handed_over
