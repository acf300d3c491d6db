"""Plugins of `OpenAIServer` that break it on purpose, to show that the soak notices."""

import itertools

import torch

from vllm_hsd.tools.audit.mutants import replace


def one_token_in_a_hundred() -> None:
    """The target's verification now and then emits a token that it never drew."""
    count = itertools.count(1)

    def verify_with_a_fault(verify, self, *args, **kwargs):
        output = verify(self, *args, **kwargs)
        ids = output.sampled_token_ids
        for row in range(len(ids)):
            if ids[row, 0] >= 0 and next(count) % 100 == 0:
                ids[row, 0] = torch.where(ids[row, 0] == 5, 6, 5)
        return output

    sampler = "vllm_hsd.host.cascade_sampler:CascadeRejectionSampler"
    replace(f"{sampler}.__call__", verify_with_a_fault)


def one_request_in_fifty_forgotten() -> None:
    """The engine takes a request and never answers."""
    count = itertools.count(1)

    def add_most(add, self, request, *args, **kwargs):
        if next(count) % 50:
            add(self, request, *args, **kwargs)

    replace("vllm.v1.engine.core:EngineCore.add_request", add_most)


def both() -> None:
    one_token_in_a_hundred()
    one_request_in_fifty_forgotten()
