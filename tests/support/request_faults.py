"""Plugins of `OpenAIServer`: errors of one request, which names them by its seed."""

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
    from vllm_hsd.host.host_speculator import HostSpeculator

    propose = HostSpeculator.propose

    def propose_or_raise(self, batch, *args, **kwargs):
        if not kwargs.get("dummy_run"):
            _raise_in(batch, self.parameters.states, DRAFTED)
        return propose(self, batch, *args, **kwargs)

    HostSpeculator.propose = propose_or_raise


def verification() -> None:
    """Raise while the target verifies a batch with such a request."""
    from vllm_hsd.host.cascade_sampler import CascadeRejectionSampler

    verify = CascadeRejectionSampler.__call__

    def verify_or_raise(self, logits, batch, *args, **kwargs):
        _raise_in(batch, self.parameters.states, VERIFIED)
        return verify(self, logits, batch, *args, **kwargs)

    CascadeRejectionSampler.__call__ = verify_or_raise


def _raise_for(params, seed: int) -> None:
    if params.seed == seed:
        raise OwnFault("the test's own fault")


def _raise_in(batch, states, seed: int) -> None:
    if (states.seeds.np[batch.idx_mapping_np[: batch.num_reqs]] == seed).any():
        raise OwnFault("the test's own fault")
