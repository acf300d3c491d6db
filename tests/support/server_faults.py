"""Plugins of `OpenAIServer`: errors of one request, named by its seed, and faults for the soak."""

import itertools

import torch

from vllm_hsd.tools.audit.mutants import replace

SAMPLER = "vllm_hsd.host.cascade_sampler:CascadeRejectionSampler"
VALIDATED, ADDED, GRAMMAR, DRAFTED, VERIFIED = range(7001, 7006)


class OwnFault(RuntimeError):
    """Raised for one request."""


def install() -> None:
    """Raise where vLLM's interface lets one request end alone."""

    def validate_or_raise(validate, self, speculative_config):
        _raise_for(self, VALIDATED)
        return validate(self, speculative_config)

    def add_or_raise(add, self, request):
        _raise_for(request.sampling_params, ADDED)
        return add(self, request)

    def accept_or_refuse(accept, self, request, token_ids):
        accepted = accept(self, request, token_ids)
        return accepted and request.sampling_params.seed != GRAMMAR

    replace("vllm.sampling_params:SamplingParams._validate_spec_decode", validate_or_raise)
    replace("vllm.v1.engine.core:EngineCore.preprocess_add_request", add_or_raise)
    replace("vllm.v1.structured_output:StructuredOutputManager.accept_tokens", accept_or_refuse)


def drafting() -> None:
    """Raise while the cascade drafts for a batch with such a request."""

    def propose_or_raise(propose, self, batch, *args, **kwargs):
        if not kwargs.get("dummy_run"):
            _raise_in(batch, self.parameters.states, DRAFTED)
        return propose(self, batch, *args, **kwargs)

    replace("vllm_hsd.host.host_speculator:HostSpeculator.propose", propose_or_raise)


def verification() -> None:
    """Raise while the target verifies a batch with such a request."""

    def verify_or_raise(verify, self, logits, batch, *args, **kwargs):
        _raise_in(batch, self.parameters.states, VERIFIED)
        return verify(self, logits, batch, *args, **kwargs)

    replace(f"{SAMPLER}.__call__", verify_or_raise)


def soak() -> None:
    """One token in a hundred is none that the target drew; one request in fifty gets no answer."""
    tokens, requests = itertools.count(1), itertools.count(1)

    def verify_with_a_fault(verify, self, *args, **kwargs):
        output = verify(self, *args, **kwargs)
        ids = output.sampled_token_ids
        for row in range(len(ids)):
            if ids[row, 0] >= 0 and next(tokens) % 100 == 0:
                ids[row, 0] = torch.where(ids[row, 0] == 5, 6, 5)
        return output

    def add_most(add, self, request, *args, **kwargs):
        if next(requests) % 50:
            add(self, request, *args, **kwargs)

    replace(f"{SAMPLER}.__call__", verify_with_a_fault)
    replace("vllm.v1.engine.core:EngineCore.add_request", add_most)


def _raise_for(params, seed: int) -> None:
    if params.seed == seed:
        raise OwnFault("the test's own fault")


def _raise_in(batch, states, seed: int) -> None:
    if (states.seeds.np[batch.idx_mapping_np[: batch.num_reqs]] == seed).any():
        raise OwnFault("the test's own fault")
