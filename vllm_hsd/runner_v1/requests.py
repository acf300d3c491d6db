"""What drafting keeps about the requests of a V1 runner between steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_hsd.core.drafts import DraftStore, ragged_arange
from vllm_hsd.core.levels import PerRequest
from vllm_hsd.core.stopping import EntropyThresholds
from vllm_hsd.runner_v1.noise import RequestNoise
from vllm_hsd.verify.rng import host_uniforms

# Uniforms of a request and level that are drawn at once: 256 cost hardly more than one. No step
# takes more than num_speculative_tokens + 1 <= 129.
_BUFFERED = 256
# Beyond any text.
NOTHING_KEPT = np.iinfo(np.int64).max
# Sentinel: nothing buffered.
_NONE = np.iinfo(np.int64).min // 2


@dataclass(frozen=True)
class RequestLimits:
    """What the sampling parameters of a request say about drafting.

    Attributes:
        seed: the user's, None without one.
        eos: token that ends the request, -1 for none.
        max_tokens: most tokens to generate.
        noise: with which its tokens are drawn; None where they are drawn from uniforms.
    """

    seed: int | None
    eos: int
    max_tokens: int
    noise: RequestNoise | None = None


class RequestTable:
    """Arrays indexed by request slot; a slot belongs to a request from its first step to its last.

    There are as many slots as the runner's batch has rows. Where a request that waits (preempted,
    or not scheduled) holds a slot that a newcomer needs, its draft is dropped and what must not be
    lost is set aside: its seed, its draw counters and its thresholds.

    The noise of a coupled request belongs to a position of its text, see `runner_v1.noise`. Others
    draw by uniforms, keyed by (request seed, level, draw number), with a counter per request and
    level that only grows: a uniform keyed by position would be met again by the next step, after a
    block verification that had looked at it.

    Args:
        num_levels: levels of the cascade.
        drafts: the drafts that wait for the target; its slots are this table's.
        engine_seed: vLLM's seed. Unseeded requests derive theirs from it and from the order in
            which they arrive, so that all tensor-parallel ranks draw alike and a run repeats.
            (vLLM adds a random suffix to request ids: they would not do.)
        per_request: what else keeps something about the request in a slot.

    Attributes:
        rows: [slots] int64, row in the runner's batch.
        end: [slots] int64, tokens in the text; grows with the draft.
        committed: [slots] int64, tokens in the text without the draft.
        noise: [slots] `RequestNoise` of coupled requests, None for the others.
        eos, max_tokens: [slots] int64, see `RequestLimits`.
        seeded: [slots] bool, the user gave a seed.
        cached: [levels, slots] int64, positions whose KV entries are valid.
        sits_out: [levels, slots] bool, a level lacks what it needs to draft for the request.
        kept_from: [levels, slots] int64, first position whose state of the target a level has kept
            from earlier steps; `NOTHING_KEPT` for none.
        thresholds: entropy thresholds per level and slot.
    """

    def __init__(
        self,
        num_levels: int,
        drafts: DraftStore,
        engine_seed: int,
        per_request: Sequence[PerRequest] = (),
    ) -> None:
        num_slots = len(drafts.counts)
        self.drafts, self.per_request = drafts, per_request
        self.engine_seed = engine_seed
        self.arrivals = 0
        self.slot_of: dict[str, int] = {}
        # Low slots first, and the last one freed is the next one taken: few are ever touched.
        self.free = list(range(num_slots))[::-1]
        self.waiting: dict[str, tuple[list[np.ndarray], list[Any]]] = {}
        self.rows = np.zeros(num_slots, dtype=np.int64)
        self.end = np.zeros(num_slots, dtype=np.int64)
        self.committed = np.zeros(num_slots, dtype=np.int64)
        self.noise = np.full(num_slots, None)
        self.eos = np.zeros(num_slots, dtype=np.int64)
        self.max_tokens = np.zeros(num_slots, dtype=np.int64)
        self.seeded = np.zeros(num_slots, dtype=bool)
        self.cached = np.zeros((num_levels, num_slots), dtype=np.int64)
        self.sits_out = np.zeros((num_levels, num_slots), dtype=bool)
        self.kept_from = np.full((num_levels, num_slots), NOTHING_KEPT)
        self.thresholds = EntropyThresholds.fresh(num_levels, num_slots)
        self.seed = np.zeros(num_slots, dtype=np.int64)
        # The last row of these three is the target's.
        self.draws = np.zeros((num_levels + 1, num_slots), dtype=np.int64)
        self.buffered = np.zeros((num_levels + 1, num_slots, _BUFFERED))
        self.buffered_from = np.full((num_levels + 1, num_slots), _NONE)

    def slots(
        self, request_ids: Sequence[str], limits: Callable[[str], RequestLimits]
    ) -> np.ndarray:
        """[n] slots of the requests; unknown ones are added with an empty cache."""
        found = [
            self.slot_of[request_id]
            if request_id in self.slot_of
            else self._add(request_id, limits)
            for request_id in request_ids
        ]
        return np.array(found, dtype=np.int64)

    def remove(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored (aborted before a step)."""
        self.waiting.pop(request_id, None)
        self._release(request_id)

    def enter(
        self,
        request_id: str,
        limits: Callable[[str], RequestLimits],
        num_cached: int | np.ndarray,
    ) -> None:
        """A request enters the batch, new or resumed.

        Args:
            request_id: the request.
            limits: what its sampling parameters say.
            num_cached: valid KV entries, one number or one per level.
        """
        slot = self.slots([request_id], limits)[0]
        self.cached[:, slot] = num_cached
        self._forget_states(slot)
        self.drafts.clear(slot)

    def make_room(self, in_batch: Collection[str]) -> None:
        """Free the slots of requests that are not in the batch, if the others need them."""
        if sum(request_id not in self.slot_of for request_id in in_batch) <= len(self.free):
            return
        for request_id, slot in list(self.slot_of.items()):
            if request_id in in_batch:
                continue
            kept = (self.seed, self.draws, self.thresholds.total, self.thresholds.count)
            self.waiting[request_id] = (
                [*(array[..., slot].copy() for array in kept), self.noise[slot]],
                [item.set_aside(slot) for item in self.per_request],
            )
            self._release(request_id)

    def uniforms(self, slots: np.ndarray, counts: np.ndarray, stream: int) -> np.ndarray:
        """[sum(counts)] float64 in [0, 1), the next counts[i] of every request.

        `stream` is the level, or the number of levels for the target.
        """
        draws, first = self.draws[stream, slots], self.buffered_from[stream, slots]
        short = draws + counts > first + _BUFFERED
        if short.any():
            self._refill(slots[short], stream)
            first = self.buffered_from[stream, slots]
        owners, offsets = ragged_arange(counts)
        self.draws[stream, slots] += counts
        return self.buffered[stream, slots[owners], (draws - first)[owners] + offsets]

    def _refill(self, slots: np.ndarray, stream: int) -> None:
        draws = self.draws[stream, slots]
        self.buffered_from[stream, slots] = draws
        self.buffered[stream, slots] = host_uniforms(
            self.seed[slots, None], np.array(stream), draws[:, None] + np.arange(_BUFFERED)
        )

    def _add(self, request_id: str, limits: Callable[[str], RequestLimits]) -> int:
        slot = self.free.pop()
        self.slot_of[request_id] = slot
        given = limits(request_id)
        self.eos[slot], self.max_tokens[slot] = given.eos, given.max_tokens
        self.seeded[slot] = given.seed is not None
        self.cached[:, slot] = 0
        self._forget_states(slot)
        self.buffered_from[:, slot] = _NONE
        self.drafts.clear(slot)
        if request_id in self.waiting:
            kept, others = self.waiting.pop(request_id)
            for item, state in zip(self.per_request, others, strict=True):
                item.restore(slot, state)
            self.seed[slot], self.draws[:, slot] = kept[0], kept[1]
            self.thresholds.total[:, slot], self.thresholds.count[:, slot] = kept[2], kept[3]
            self.noise[slot] = kept[4]
            return slot
        self.seed[slot] = self.derived_seed() if given.seed is None else _int64(given.seed)
        self.noise[slot] = given.noise
        self.arrivals += 1
        self.draws[:, slot] = 0
        self.thresholds.total[:, slot] = 0
        self.thresholds.count[:, slot] = 0
        return slot

    def _forget_states(self, slot: int) -> None:
        self.sits_out[:, slot] = False
        self.kept_from[:, slot] = NOTHING_KEPT

    def _release(self, request_id: str) -> None:
        slot = self.slot_of.pop(request_id, None)
        if slot is not None:
            self.drafts.clear(slot)
            self.noise[slot] = None
            for item in self.per_request:
                item.forget(slot)
            self.free.append(slot)

    def derived_seed(self) -> int:
        """A seed of the request that arrives next, any 64 bits."""
        digest = hashlib.blake2b(f"{self.engine_seed}:{self.arrivals}".encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "little", signed=True)


def _int64(seed: int) -> int:
    """The low 64 bits of a seed of any size, as a signed number."""
    low = seed % 2**64
    return low - 2**64 if low >= 2**63 else low
