"""On a CPU the scheduler is told how long each draft is."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_hsd.host.draft_lengths import get_draft_tokens
from vllm_hsd.host.engine_hooks import NeedsHooks, update_draft_token_ids


def scheduled(config, *, refused: bool = True, structured: bool = True, prompt: bool = False):
    """What a request's draft of three tokens is to the scheduler, after vLLM's own look at it."""
    request = SimpleNamespace(use_structured_output=structured, is_prefill_chunk=prompt)
    scheduler = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=config), requests={"a": request}
    )

    def original(self, drafts):
        request.spec_token_ids = [] if prompt else [5, 6, 7][: 1 if refused else 3]

    drafts = SimpleNamespace(req_ids=["ended", "a"], draft_token_ids=[[8], [5, 6, 7]])
    update_draft_token_ids(original, scheduler, drafts)
    return request.spec_token_ids


def test_the_token_that_a_grammar_refuses_is_scheduled():
    """As a placeholder, which is verified; its mask allows nothing."""
    assert scheduled(NeedsHooks()) == [5, -1]
    assert scheduled(NeedsHooks(), refused=False) == [5, 6, 7]
    # What is cut for another reason, or for another verifier, stays cut.
    assert scheduled(NeedsHooks(), structured=False) == scheduled(None) == [5]
    assert scheduled(NeedsHooks(), prompt=True) == []


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
