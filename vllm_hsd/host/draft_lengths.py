"""Drafts as long as they are, on a CPU: a row of the target that verifies nothing costs there.

Lengths lie on the device, and on a GPU the scheduler runs ahead of it: every request is scheduled
with the longest draft. On a CPU scheduling waits for each step, and lengths are read from memory.
A scheduler is given here what lengths that change ask of it: a table that learns, and slots.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus

from vllm_hsd.host.adaptive import learn_lengths
from vllm_hsd.host.engine_hooks import NeedsHooks
from vllm_hsd.host.hooks import REGISTRY, SCHEDULER, replace_on

GET_DRAFT_TOKENS = "vllm.v1.worker.gpu.spec_decode.utils.DraftTokensHandler.get_draft_tokens"
_ALLOCATE = "vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots"


@REGISTRY.replaces_on_runner(
    GET_DRAFT_TOKENS,
    "self",
    why="hands drafts to the scheduler as long as they are where it waits for them",
    until="vLLM asks drafters for the lengths of their drafts",
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


@REGISTRY.replaces(
    f"{SCHEDULER}.__init__",
    None,
    why="puts a learned table in the place of the fixed one of draft lengths by batch size, and "
    "has as many slots reserved for every draft",
    until="a plugin can choose the draft length of a step, and vLLM reserves as many",
)
def make_scheduler(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    config = self.vllm_config.speculative_config
    if not isinstance(config, NeedsHooks):
        return
    learn_lengths(self, config)
    # Drafts of asynchronous scheduling are as long as it says, whatever was drawn.
    if not self.scheduler_config.async_scheduling:
        replace_on(self.kv_cache_manager, _ALLOCATE, by=self.num_spec_tokens)


@REGISTRY.replaces_on_runner(
    _ALLOCATE,
    None,
    why="reserves as many slots for every draft: where no block is free the scheduler may preempt "
    "the request itself, and must not drop its draft for what was drawn",
    until="vLLM does",
)
def allocate_slots(
    original, longest: int, request, num_new_tokens, *args, num_lookahead_tokens=0, **kwargs
):
    if request.status is RequestStatus.RUNNING:
        num_lookahead_tokens += max(longest + 1 - num_new_tokens, 0)
    return original(
        request, num_new_tokens, *args, num_lookahead_tokens=num_lookahead_tokens, **kwargs
    )
