"""A thinking budget belongs to its request, in whichever row that is."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from vllm_hsd.runner_v1.replacements import sync_thinking_budgets
from vllm_hsd.runner_v1.thinking_budget import force_end_of_thinking

START, END, VOCABULARY = 1, [2, 3], 8


@pytest.fixture
def holder():
    reasoning = SimpleNamespace(reasoning_start_token_ids=[START], reasoning_end_token_ids=END)
    return ThinkingBudgetStateHolder(reasoning, 4, 3, torch.device("cpu"), False)


def sync(holder, removed=(), added=(), moved=()) -> None:
    update = BatchUpdate(4, list(removed), list(added), list(moved))
    sync_thinking_budgets(type(holder).sync_batch, holder, update)


def budget(row: int, tokens: int):
    return row, SamplingParams(thinking_token_budget=tokens), [START, 5], []


def forced(holder, outputs, drafts) -> list[int]:
    """Token that each row must have, -1 for none."""
    counts = np.array([len(draft) for draft in drafts])
    padded = np.full((len(drafts), max(counts.max(), 1)), -1)
    for i, draft in enumerate(drafts):
        padded[i, : len(draft)] = draft
    logits = torch.zeros(int((counts + 1).sum()), VOCABULARY)
    force_end_of_thinking(holder, logits, outputs, counts, padded)
    return [int(row.argmax()) if row.max() > 0 else -1 for row in logits]


def test_the_end_is_forced_token_by_token_in_the_request_s_rows(holder):
    sync(holder, added=[budget(0, 3)])
    # Two more tokens may be thought; then a draft meets the end, and ends with its tokens.
    assert forced(holder, [[], []], [[4, 4, 2], [6]]) == [-1, -1, 2, 3, -1, -1]
    assert forced(holder, [[4, 4], [6]], [[2, 3], []]) == [2, 3, -1, -1]
    # The draft was accepted as far as the first token of the end.
    assert forced(holder, [[4, 4, 2], [6, 6]], [[], [7]]) == [3, -1, -1]
    assert forced(holder, [[4, 4, 2, 3], [6, 6, 7]], [[5], []]) == [-1, -1, -1]


def test_a_row_that_another_request_moves_into_has_no_budget(holder):
    sync(holder, added=[budget(0, 9), budget(2, 4)])
    move = (1, 0, MoveDirectionality.UNIDIRECTIONAL)
    # vLLM names no removed row into which it moves a request.
    sync(holder, moved=[move])
    assert list(holder._state) == [2]
    sync(holder, moved=[(2, 0, MoveDirectionality.SWAP)])
    assert list(holder._state) == [0]
