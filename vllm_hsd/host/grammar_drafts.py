"""What a grammar says of drafts that the scheduler knows, and of those that it does not."""

from __future__ import annotations

from typing import Any

from vllm_hsd.host.engine_hooks import NeedsHooks
from vllm_hsd.host.forced_tokens import force
from vllm_hsd.host.hooks import REGISTRY, SCHEDULER

# Of what the scheduler hands to the worker: names of requests whose drafts a grammar has read.
_READ = "hsd_read"


@REGISTRY.replaces(
    f"{SCHEDULER}.update_draft_token_ids",
    "self draft_token_ids",
    why="schedules the draft token that a grammar refuses, to be verified with the target's row: "
    "without asynchronous scheduling, as on a CPU, vLLM ends the draft before it, and so by what "
    "was drawn; and puts what a grammar forces in the place of drafts",
    until="vLLM verifies it without asynchronous scheduling too",
)
def update_draft_token_ids(original: Any, self: Any, draft_token_ids: Any) -> None:
    forced = force(self, draft_token_ids)
    original(self, draft_token_ids)
    if not isinstance(self.vllm_config.speculative_config, NeedsHooks):
        return
    drafts = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
    for name, tokens in drafts:
        request = self.requests.get(name)
        if (
            request is None
            or name in forced
            or not request.use_structured_output
            or request.is_prefill_chunk
        ):
            continue
        if len(request.spec_token_ids) < len(tokens):
            # As asynchronous scheduling pads it: the mask of its row, and then of none.
            request.spec_token_ids = [*request.spec_token_ids, -1]


@REGISTRY.replaces(
    f"{SCHEDULER}.update_draft_token_ids_in_output",
    "self draft_token_ids scheduler_output",
    why="notes whose drafts a grammar reads, which are those of the worker's last step",
    until="vLLM tells drafts that a grammar refuses from those that it has not read",
)
def update_draft_token_ids_in_output(
    original: Any, self: Any, draft_token_ids: Any, scheduler_output: Any
) -> None:
    drafts = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
    setattr(scheduler_output, _READ, {name for name, tokens in drafts if tokens[:1] != [-1]})
    original(self, draft_token_ids, scheduler_output)


@REGISTRY.replaces(
    f"{SCHEDULER}.get_grammar_bitmask",
    "self scheduler_output",
    why="ends drafts that no grammar has read before their first token, of a request that was not "
    "in the last step of asynchronous scheduling: the rows after it have no mask",
    until="vLLM tells drafts that a grammar refuses from those that it has not read",
)
def get_grammar_bitmask(original: Any, self: Any, scheduler_output: Any) -> Any:
    output, config = original(self, scheduler_output), self.vllm_config
    known = getattr(scheduler_output, _READ, ())
    if (
        output is not None
        and config.scheduler_config.async_scheduling
        and isinstance(config.speculative_config, NeedsHooks)
    ):
        each = zip(output.structured_output_request_ids, output.num_acceptable_drafts, strict=True)
        # Our samplers verify one more token than a grammar accepts.
        output.num_acceptable_drafts = [n if n or name in known else -1 for name, n in each]
    return output
