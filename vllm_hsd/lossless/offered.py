"""What an engine's drafts were drawn from, recorded while it serves.

The distribution that a draft token was drawn from is a function of the text before it, so tokens
may be ordered by it (see docs/lossless.md). The drawn token itself is not: only a lookup's, or one
of a greedy drafter, which is the same as such a distribution with one token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_hsd.lossless.directions import ROW_WIDTH, rows_of
from vllm_hsd.runner_v1 import sampler as sampler_module
from vllm_hsd.verify.inputs import ChainBatch

# Of a request: place in its answer -> a row of `directions.rows_of`, of ids and probabilities;
# place of the first token of a step -> draft tokens there, which are fixed before the verdict.
Offered = tuple[dict[int, np.ndarray], dict[int, int]]


class OfferRecorder:
    """Follows the verifier of one V1 runner.

    Attributes:
        certain: whether draft tokens without probabilities are those of a lookup or of a greedy
            drafter; otherwise they are left out. None: draft lengths are recorded, and no rows.
        found: request id -> what it was offered.
    """

    def __init__(self, runner: Any, certain: bool | None) -> None:
        self.runner, self.certain = runner, certain
        self.found: dict[str, Offered] = {}
        self.verify = runner.rejection_sampler.forward
        self.drafts_to_verify = sampler_module.drafts_to_verify
        runner.rejection_sampler.forward = self._forward
        sampler_module.drafts_to_verify = self._drafts_to_verify

    def _forward(self, metadata, draft_probs, logits, sampling_metadata):
        if not hasattr(self.runner.rejection_sampler, "state"):
            counts = np.array(metadata.num_draft_tokens, dtype=np.int64)
            token_ids = metadata.draft_token_ids.cpu().numpy()
            every = list(range(len(counts)))
            if self.runner.input_batch.num_reqs == len(counts):  # not vLLM's warm-up
                self._record(ChainBatch.flat(logits, draft_probs, token_ids, counts), every)
        return self.verify(metadata, draft_probs, logits, sampling_metadata)

    def _drafts_to_verify(self, drafts, slots, *args):
        batch, scored = self.drafts_to_verify(drafts, slots, *args)
        state, size = self.runner.rejection_sampler.state, self.runner.input_batch.num_reqs
        place = {slot: i for i, slot in enumerate(state.request_slots(size).tolist())}
        self._record(batch, [place[slot] for slot in slots.tolist()])
        return batch, scored

    def _record(self, batch: ChainBatch, requests: list[int]) -> None:
        """Keep what every request of the runner's batch is offered, by its number there."""
        input_batch = self.runner.input_batch
        drawn = batch.valid & (batch.draft_rows >= 0) & (self.certain is not None)
        found = None
        if batch.draft_probs is not None and drawn.any():
            index = torch.from_numpy(batch.draft_rows[drawn]).to(batch.draft_probs.device)
            found = iter(rows_of(batch.draft_probs.index_select(0, index).log()))
        places = (input_batch.num_tokens_no_spec - input_batch.num_prompt_tokens)[requests]
        discarded = self.runner.discard_request_mask.np[requests]
        for i, request in enumerate(requests):
            offers, lengths = self.found.setdefault(input_batch.req_ids[request], ({}, {}))
            place, length = int(places[i]), int(batch.lengths[i])
            if not discarded[i]:
                lengths[place] = length
                for later in [each for each in offers if each >= place]:
                    del offers[later]  # the rest of a rejected draft
            for t in range(length):
                if drawn[i, t]:
                    assert found is not None
                    row = next(found)
                elif self.certain and batch.tokens[i, t] >= 0:
                    row = np.full((2, ROW_WIDTH), -1, dtype=np.float32)
                    row[:, 0] = batch.tokens[i, t], 1
                else:
                    continue
                if not discarded[i]:
                    offers[place + t] = row


def install(llm: Any, certain: bool | None) -> bool:
    """Record from now on; whether the runner is one whose drafts can be followed."""
    return bool(llm.collective_rpc(_install, args=(certain,))[0])


def take(llm: Any) -> dict[str, Offered]:
    """What was offered by request id since `install` or the last call."""
    found: dict[str, Offered] = llm.collective_rpc(_take)[0]
    return found


def _install(worker: Any, certain: bool | None) -> bool:
    runner = worker.model_runner
    if hasattr(runner, "vllm_hsd_recorder"):
        runner.vllm_hsd_recorder.certain, runner.vllm_hsd_recorder.found = certain, {}
        return True
    if not hasattr(runner, "rejection_sampler") or not hasattr(runner, "discard_request_mask"):
        return False  # the V2 runner
    if runner.use_async_scheduling:
        return False  # it schedules ahead of what it knows to be accepted
    runner.vllm_hsd_recorder = OfferRecorder(runner, certain)
    return True


def _take(worker: Any) -> dict[str, Offered]:
    recorder = worker.model_runner.vllm_hsd_recorder
    found, recorder.found = recorder.found, {}
    return found
