"""Lookups next to a head of the target that vLLM's own drafter runs; see `budget.source_choice`.

The head reads every step of the target and drafts for every request, as it does alone, or only one
token where `FurtherPasses` says so. Where a lookup is chosen its tokens take the place of the
head's, and the verifier takes them for certain.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

from vllm_hsd.budget.further_passes import FurtherPasses
from vllm_hsd.budget.source_choice import SourcesLookup
from vllm_hsd.cascade.adaptive_verification import DraftConfidence
from vllm_hsd.cascade.cascade_steps import collect
from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.cascade.schedule import compile_schedule
from vllm_hsd.cascade.vocabulary import readable
from vllm_hsd.host.base_speculator import BaseSpeculator
from vllm_hsd.host.request_parameters import RequestParameters


class HeadSources:
    """Base of a drafter of vLLM's, next to lookups; see `with_lookups`.

    Attributes:
        req_states, parameters: as of `speculator.CascadeSpeculator`.
        schedule, state: of the lookups.
        lookup: the sources.
        further: whether the head runs passes after its first one.
        confidence: of the drafts, in the place of the head's estimator of its own.
        draft_length: int32 [max_num_reqs], tokens of each slot's draft.
    """

    req_states: Any
    parameters: RequestParameters
    _stage: Any = BaseSpeculator._stage

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        own: Any = self
        self.schedule = compile_schedule([LevelOptions(own.num_speculative_steps)], lookup=True)
        self.state = ProposalState.allocate(
            self.schedule,
            batch=own.max_num_reqs,
            max_num_reqs=own.max_num_reqs,
            vocab_size=own.vocab_size,
            dtypes=[None],
            num_kv_groups=1,
            device=device,
        )
        self.lookup: SourcesLookup = vllm_config.speculative_config.hsd_sources.build(self, 0)
        self.further = FurtherPasses(self.lookup.wanted)
        self.scales = torch.ones(1, dtype=torch.float32, device=device)
        self.draft_length = torch.zeros(own.max_num_reqs, dtype=torch.int32, device=device)
        # The last slot is of no request.
        size = own.max_num_reqs + 1, own.num_speculative_steps, device
        # Not with the weights, which sleep mode may discard.
        self.confidence = DraftConfidence(
            OnlineAcceptanceEstimator(*size), lambda slots: self.draft_length[slots]
        )

    @torch.inference_mode()
    def propose(
        self,
        input_batch,
        attn_metadata,
        slot_mappings,
        last_hidden_states,
        aux_hidden_states,
        num_sampled,
        *args,
        dummy_run=False,
        num_speculative_tokens=None,
        **kwargs,
    ) -> torch.Tensor:
        """vLLM's, then the choice."""
        read = attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled
        longest = num_speculative_tokens
        own: Any = self
        drawn = own.num_speculative_steps if longest is None else longest
        # vLLM's drafter ends after its first pass where one token is asked for.
        if not dummy_run and drawn > 1 and not self.further.due():
            drawn = 1
        drafts = super().propose(  # type: ignore[misc]
            input_batch,
            *read,
            *args,
            dummy_run=dummy_run,
            num_speculative_tokens=drawn,
            **kwargs,
        )
        count, window = input_batch.num_reqs, self.schedule.window
        if input_batch.has_prefill and not dummy_run:
            begins = input_batch.is_prefilling_np[:count]
            slots = input_batch.idx_mapping_np[:count][begins]
            self.lookup.forget(async_tensor_h2d(slots, device=own.device, dtype=torch.int64))
        if dummy_run or longest == 0:
            return drafts
        state, text = self.state.bucket(count), self.req_states.all_token_ids.gpu
        self._stage(state, self.schedule, input_batch.idx_mapping, num_sampled)
        if longest is not None:
            state.requested.clamp_(max=longest)
        self.lookup.offer(state, text)
        # What the head has drafted is in the text like an offer; nothing else is by now.
        state.window[:, window : window + drafts.shape[1]] = drafts
        torch.clamp(state.requested, max=drawn, out=state.drafted)
        state.end += state.drafted[0]
        self.lookup.choose(state)
        collect(state, self.schedule)
        drafts.copy_(readable(state.draft_tokens, self.req_states.vocab_size))
        slots = input_batch.idx_mapping.long()
        self.draft_length[slots] = state.draft_length
        if own.acceptance_estimator is not None:
            own.acceptance_estimator.publish(
                own.draft_token_confidence_probs, slots, self.lookup.drawn
            )
        return drafts


@functools.cache
def with_lookups(drafter: type) -> type:
    """A class of vLLM's drafters, next to lookups."""
    return type(f"{drafter.__name__}WithLookups", (HeadSources, drafter), {})
