"""What our kernels read of the sampling parameters of vLLM's request slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

from vllm_hsd.cascade.prediction_lookup import PredictionLookup
from vllm_hsd.host.request_keys import NUM_TOKENS, PREDICTION
from vllm_hsd.kernels.filter_rows import Filters

UNLIMITED = 2**31 - 1


class RequestParameters:
    """Temperatures with the sign of the rule, filters, and the keys of `host.request_keys`.

    A request with a seed is coupled: its tokens are those that vLLM draws for that seed without
    speculation, whatever is drafted.

    Args:
        states: vLLM's `SamplingStates`.
        couples_all: whether every sampled request is coupled.

    Attributes:
        coupled: bool [max_num_reqs] on the host.
        filtered: bool [max_num_reqs] on the host, sampled with top-k, top-p or min-p.
        entered: bool [max_num_reqs] on the host, of slots with a new or resumed request; whoever
            takes note of one resets it.
        predictions: what drafts from predicted texts.
        followers: told of changed parameters, by `take_parameters`.
    """

    def __init__(self, states: Any, couples_all: bool) -> None:
        self.states, self.couples_all = states, couples_all
        self.coupled = np.zeros(states.max_num_reqs, dtype=bool)
        self.filtered = np.zeros(states.max_num_reqs, dtype=bool)
        self.entered = np.zeros(states.max_num_reqs, dtype=bool)
        self.signed = UvaBackedTensor(states.max_num_reqs, dtype=torch.float32)
        self.limits = UvaBackedTensor(states.max_num_reqs, dtype=torch.int32)
        self.limits.np.fill(UNLIMITED)
        self.limits.copy_to_uva()
        self.predictions: list[PredictionLookup] = []
        self.followers: list[Any] = []
        self.changed = False

    def add_request(self, slot: int) -> None:
        """Take over what vLLM knows of a slot's new request."""
        states = self.states
        self.entered[slot] = True
        # Of tokens that tie for the only one, vLLM's filter keeps the first.
        temperature = states.temperature.np[slot] if states.top_k.np[slot] != 1 else 0.0
        self.coupled[slot] = temperature != 0 and (self.couples_all or states.seeds_set[slot])
        self.filtered[slot] = temperature != 0 and (
            states.min_p.np[slot] != 0
            or states.top_k.np[slot] != states.vocab_size
            or states.top_p.np[slot] != 1
        )
        self.signed.np[slot] = -temperature if self.coupled[slot] else temperature
        self.changed = True

    def add_keys(self, slot: int, prompt_tokens: int, keys: dict[str, Any] | None) -> None:
        """Take over what a slot's new request says of its drafts.

        Args:
            prompt_tokens: of the request.
            keys: its `extra_args`, as `host.request_keys` has checked them.
        """
        keys = keys or {}
        self.limits.np[slot] = keys.get(NUM_TOKENS, UNLIMITED)
        self.changed = True
        for predictions in self.predictions:
            predictions.add_request(slot, prompt_tokens, keys.get(PREDICTION, ()))

    def copy_changed(self) -> None:
        """Once in a step, before anything reads `temperature`."""
        if self.changed:
            self.signed.copy_to_uva()
            self.limits.copy_to_uva()
            for each in self.followers:
                each.take_parameters()
            self.changed = False

    @property
    def temperature(self) -> torch.Tensor:
        """float32 [max_num_reqs], 0 if greedy, negative if coupled."""
        return self.signed.gpu

    @property
    def seeds(self) -> torch.Tensor:
        """int64 [max_num_reqs]."""
        return self.states.seeds.gpu

    def tensors(self) -> dict[str, Any]:
        """All of them by the names of the arguments of `cascade_steps.stage`."""
        return {
            "temperature": self.temperature,
            "seeds": self.seeds,
            "most_drafted": self.limits.gpu,
            **self.filters._asdict(),
        }

    @property
    def filters(self) -> Filters:
        """Of max_num_reqs requests."""
        return Filters(*(getattr(self.states, name).gpu for name in Filters._fields))
