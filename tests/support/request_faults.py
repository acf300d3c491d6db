"""Errors that concern one request, raised wherever vLLM or this package looks at it.

`install` and the other functions are general plugins of vLLM, given to
`OpenAIServer(plugin=...)`. A request asks for its error by its seed.
"""

VALIDATED, ADDED, GRAMMAR, DRAFTED, VERIFIED = range(7001, 7006)


class OwnFault(RuntimeError):
    """Raised for one request."""


def install() -> None:
    """Raise where vLLM's interface lets one request end alone."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.structured_output import StructuredOutputManager

    validate = SamplingParams._validate_spec_decode
    add, accept = EngineCore.preprocess_add_request, StructuredOutputManager.accept_tokens

    def validate_or_raise(self, speculative_config):
        _raise_for(self, VALIDATED)
        return validate(self, speculative_config)

    def add_or_raise(self, request):
        _raise_for(request.sampling_params, ADDED)
        return add(self, request)

    def accept_or_refuse(self, request, token_ids):
        accepted = accept(self, request, token_ids)
        return accepted and request.sampling_params.seed != GRAMMAR

    SamplingParams._validate_spec_decode = validate_or_raise
    EngineCore.preprocess_add_request = add_or_raise
    StructuredOutputManager.accept_tokens = accept_or_refuse


def drafting() -> None:
    """Raise while the cascade drafts for a batch with such a request."""
    from vllm_hsd.runner_v1.proposer import CascadeProposer

    propose = CascadeProposer.propose_draft_token_ids

    def propose_or_raise(self, *args, **kwargs):
        _raise_in(self.runner, DRAFTED)
        return propose(self, *args, **kwargs)

    CascadeProposer.propose_draft_token_ids = propose_or_raise


def verification() -> None:
    """Raise while the target verifies a batch with such a request."""
    from vllm_hsd.runner_v1.sampler import CascadeSampler

    forward = CascadeSampler.forward

    def forward_or_raise(self, *args, **kwargs):
        _raise_in(self.state.runner, VERIFIED)
        return forward(self, *args, **kwargs)

    CascadeSampler.forward = forward_or_raise


def _raise_for(params, seed: int) -> None:
    if params.seed == seed:
        raise OwnFault("the test's own fault")


def _raise_in(runner, seed: int) -> None:
    batch = runner.input_batch
    for request_id in batch.req_ids[: batch.num_reqs]:
        _raise_for(runner.requests[request_id].sampling_params, seed)
