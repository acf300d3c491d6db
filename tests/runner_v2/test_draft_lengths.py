"""On a CPU the scheduler is told how long each draft is."""

from types import SimpleNamespace

import numpy as np
import torch

from vllm_hsd.runner_v2.draft_lengths import get_draft_tokens


def handed_over(*, branches=None, tokens=None) -> list[list[int]]:
    """Of three requests in slots 4, 0 and 2; the second has no draft."""
    rows = torch.tensor([-1, -1, 0, -1, 1], dtype=torch.int32)
    state = SimpleNamespace(row_of_slot=rows, draft_length=torch.tensor([0, 3]))
    runner = SimpleNamespace(
        speculator=SimpleNamespace(state=state, branches=branches),
        req_states=SimpleNamespace(req_id_to_index={"a": 4, "b": 0, "c": 2}),
        draft_tokens_handler=SimpleNamespace(draft_tokens_np=tokens),
    )
    drafts = SimpleNamespace(req_ids=["a", "b", "c"], draft_token_ids=[[-1] * 4 for _ in "abc"])
    return get_draft_tokens(lambda: drafts, runner).draft_token_ids


def test_placeholders_are_cut_to_the_drafts():
    assert handed_over() == [[-1] * 3, [], []]


def test_lists_of_trees_end_where_the_last_branch_does():
    listed = SimpleNamespace(listed=np.array([0, 2]))
    assert handed_over(branches=listed) == [[-1] * 2, [], []]


def test_whole_trees_and_tokens_that_a_grammar_judges_are_whole():
    whole = SimpleNamespace(listed=None)
    assert handed_over(branches=whole) == handed_over(tokens=object()) == [[-1] * 4] * 3
