"""Drafts as long as they are, on a CPU: a row of the target that verifies nothing costs there.

Lengths lie on the device, and on a GPU the scheduler runs ahead of it: every request is scheduled
with the longest draft. On a CPU scheduling waits for each step, and lengths are read from memory.
"""

from __future__ import annotations

from typing import Any

from vllm_hsd.host.hooks import REGISTRY
from vllm_hsd.host.registry import NONE_FILED

GET_DRAFT_TOKENS = "vllm.v1.worker.gpu.spec_decode.utils.DraftTokensHandler.get_draft_tokens"


@REGISTRY.replaces_on_runner(
    GET_DRAFT_TOKENS,
    ("self",),
    why="hands drafts to the scheduler as long as they are where it waits for them",
    until="vLLM asks drafters for the lengths of their drafts",
    issue=NONE_FILED,
)
def get_draft_tokens(original: Any, runner: Any) -> Any:
    """vLLM's placeholders, cut to the draft of each request; none for one that has no draft."""
    drafts, speculator = original(), runner.speculator
    branches = speculator.branches
    # Lists of whole trees are handed over whole.
    if drafts is None or (branches is not None and branches.listed is None):
        return drafts
    state, index = speculator.state, runner.req_states.req_id_to_index
    rows = state.row_of_slot[[index[request] for request in drafts.req_ids]].tolist()
    listed = state.draft_length if branches is None else branches.listed
    lengths = listed.tolist()
    for tokens, row in zip(drafts.draft_token_ids, rows, strict=True):
        del tokens[lengths[row] if row >= 0 else 0 :]
    return drafts
