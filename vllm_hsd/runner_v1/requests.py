"""Which request of a V1 runner has which slot, and what its sampling parameters say."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from vllm_hsd.core.cascade import Cascade
from vllm_hsd.runner_v1.noise import RequestNoise, skip_of
from vllm_hsd.runner_v1.request_state import RequestState
from vllm_hsd.runner_v1.sampling import GREEDY_BELOW


class RequestTable:
    """Gives the requests their slots; a slot belongs to a request from its first step to its last.

    There are as many slots as the runner's batch has rows. Where a request that waits (preempted,
    or not scheduled) holds a slot that a newcomer needs, its draft is dropped and what must not be
    lost is set aside.

    Args:
        runner: the GPUModelRunner (or CPUModelRunner) that hosts the target.
        cascade: drafts for the requests.
        state: the arrays with the slots.
        coupled: all sampled requests are coupled, not only those with a seed.
    """

    def __init__(self, runner: Any, cascade: Cascade, state: RequestState, coupled: bool) -> None:
        self.runner, self.cascade, self.state, self.coupled = runner, cascade, state, coupled
        self.arrivals = 0
        self.slot_of: dict[str, int] = {}
        # Low slots first, and the last one freed is the next one taken: few are ever touched.
        self.free = list(range(len(state.rows)))[::-1]
        self.waiting: dict[str, list[np.ndarray]] = {}

    def slots(self, request_ids: Sequence[str]) -> np.ndarray:
        """[n] int64 slots of the requests; unknown ones are added with an empty cache."""
        found = [
            self.slot_of[each] if each in self.slot_of else self._add(each) for each in request_ids
        ]
        return np.array(found, dtype=np.int64)

    def remove(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored (aborted before a step)."""
        self.waiting.pop(request_id, None)
        slot = self.slot_of.pop(request_id, None)
        if slot is not None:
            self.state.forget(slot)
            self.cascade.forget(slot)
            self.free.append(slot)

    def enter(self, request_id: str, num_cached: int | np.ndarray) -> None:
        """A request enters the batch, new or resumed, with so many valid KV entries per level."""
        self.state.enter(int(self.slots([request_id])[0]), num_cached)

    def make_room(self, in_batch: Collection[str]) -> None:
        """Free the slots of requests that are not in the batch, if the others need them."""
        if sum(request_id not in self.slot_of for request_id in in_batch) <= len(self.free):
            return
        for request_id, slot in list(self.slot_of.items()):
            if request_id not in in_batch:
                kept = self.state.set_aside(slot)
                self.remove(request_id)
                self.waiting[request_id] = kept

    def _add(self, request_id: str) -> int:
        state, slot = self.state, self.free.pop()
        self.slot_of[request_id] = slot
        params = self.runner.requests[request_id].sampling_params
        ignored = params.ignore_eos or params.eos_token_id is None
        state.eos[slot] = -1 if ignored else params.eos_token_id
        longest = self.runner.max_model_len if params.max_tokens is None else params.max_tokens
        state.max_tokens[slot] = longest
        if request_id in self.waiting:
            state.restore(slot, self.waiting.pop(request_id))
            return slot
        own = self._derived_seed() if params.seed is None else _int64(params.seed)
        state.seed[slot], state.noise[slot] = own, self._noise(request_id)
        self.arrivals += 1
        return slot

    def _noise(self, request_id: str) -> RequestNoise | None:
        """Noise of a request that is coupled: it has a seed, or all sampled requests are coupled.

        vLLM gives a generator to sampled requests with seeds.
        """
        request = self.runner.requests[request_id]
        generator = request.generator
        if generator is None:
            if not self.coupled or request.sampling_params.temperature < GREEDY_BELOW:
                return None
            generator = torch.Generator(self.runner.device).manual_seed(self._derived_seed())
        vocab_size = self.runner.model_config.get_vocab_size()
        return RequestNoise(generator, skip_of(self.runner.sampler.topk_topp_sampler, vocab_size))

    def _derived_seed(self) -> int:
        """A seed of the request that arrives now, any 64 bits.

        From vLLM's seed and the order of arrival: all tensor-parallel ranks draw alike, and a run
        repeats. (vLLM adds a random suffix to request ids: they would not do.)
        """
        text = f"{self.runner.model_config.seed}:{self.arrivals}"
        digest = hashlib.blake2b(text.encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "little", signed=True)


def _int64(seed: int) -> int:
    """The low 64 bits of a seed of any size, as a signed number."""
    low = seed % 2**64
    return low - 2**64 if low >= 2**63 else low
