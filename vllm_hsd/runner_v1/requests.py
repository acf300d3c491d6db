"""What the cascade remembers about the requests of a V1 runner between steps."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from vllm_hsd.core.drafts import Proposal, ragged_arange
from vllm_hsd.core.stopping import EntropyThresholds
from vllm_hsd.verify import uniforms

# Coins of a request and level that are tossed at once.
_AHEAD = 256
# As a first coin tossed ahead: there are none.
_NONE = np.iinfo(np.int64).min // 2


@dataclass
class PendingDraft:
    """A draft that waits for the target: row `row` of `proposal`."""

    proposal: Proposal
    row: int

    @property
    def token_ids(self) -> np.ndarray:
        return self.proposal.token_ids[self.row, : self.proposal.counts[self.row]]

    @property
    def sources(self) -> np.ndarray:
        """Rows of `proposal.laws`, one per token."""
        return self.proposal.source[self.row, : self.proposal.counts[self.row]]


class RequestTable:
    """Seeds, draw counters, cache positions and pending drafts, one slot per live request.

    Random numbers are keyed by (request seed, level, draw number) with a counter per request and
    level that only grows: coins keyed by position would be drawn again by the next call (DESIGN,
    what silently loses losslessness). They are tossed `_AHEAD` at a time: one call of the
    generator costs the same for one coin as for a few hundred.

    Args:
        num_levels: levels of the cascade.
        engine_seed: vLLM's seed; unseeded requests derive theirs from it and the order in which
            they arrive, so that all tensor-parallel ranks toss the same coins and a run repeats.
            (vLLM adds a random suffix to request ids: they would not do.)
    """

    def __init__(self, num_levels: int, engine_seed: int) -> None:
        self.engine_seed = engine_seed
        self.arrivals = 0
        self.slot_of: dict[str, int] = {}
        self.free: list[int] = []
        self.pending: list[PendingDraft | None] = []
        self.seed = np.zeros(0, dtype=np.int64)
        # The last row of these three is the target's.
        self.draws = np.zeros((num_levels + 1, 0), dtype=np.int64)
        self.ahead = np.zeros((num_levels + 1, 0, _AHEAD))
        self.ahead_from = np.zeros((num_levels + 1, 0), dtype=np.int64)
        self.kv = np.zeros((num_levels, 0), dtype=np.int64)
        self.thresholds = EntropyThresholds.fresh(num_levels, 0)

    def slots(self, request_ids: list[str], seeds: list[int | None]) -> np.ndarray:
        """[n] slots of the requests; unknown ones are added with an empty cache."""
        found = [
            self.slot_of[request_id] if request_id in self.slot_of else self._add(request_id, seed)
            for request_id, seed in zip(request_ids, seeds, strict=True)
        ]
        return np.array(found, dtype=np.int64)

    def remove(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored (aborted before a step)."""
        slot = self.slot_of.pop(request_id, None)
        if slot is not None:
            self.pending[slot] = None
            self.free.append(slot)

    def restart(self, request_id: str, seed: int | None, valid: int) -> None:
        """A request enters the batch, new or resumed, with `valid` tokens in the cache."""
        slot = self.slots([request_id], [seed])[0]
        self.kv[:, slot] = valid
        self.pending[slot] = None

    def coins(self, slots: np.ndarray, counts: np.ndarray, stream: int) -> torch.Tensor:
        """[sum(counts)] float64 uniforms in [0, 1), the next counts[i] of every request.

        `stream` names who tosses: level k is k, the target is the number of levels.
        """
        draws, first = self.draws[stream, slots], self.ahead_from[stream, slots]
        # Twice where longer rows of coins were made, which leaves the other requests without.
        while (short := draws + counts > first + self.ahead.shape[2]).any():
            self._toss_ahead(slots[short], int(counts.max()), stream)
            first = self.ahead_from[stream, slots]
        owners, offsets = ragged_arange(counts)
        self.draws[stream, slots] += counts
        place = (draws - first)[owners] + offsets
        return torch.from_numpy(self.ahead[stream, slots[owners], place])

    def _toss_ahead(self, slots: np.ndarray, least: int, stream: int) -> None:
        """Make the next coins of some requests, at least `least` for each."""
        if least > self.ahead.shape[2]:
            self.ahead = np.zeros((*self.draws.shape, least))
            # Nothing is left of any other request's coins either: they are tossed again.
            self.ahead_from[:] = _NONE
        draws = self.draws[stream, slots]
        self.ahead_from[stream, slots] = draws
        self.ahead[stream, slots] = uniforms(
            torch.from_numpy(self.seed[slots, None]),
            torch.full((), stream, dtype=torch.int64),
            torch.from_numpy(draws[:, None] + np.arange(self.ahead.shape[2])),
        ).numpy()

    def _add(self, request_id: str, seed: int | None) -> int:
        if not self.free:
            self._grow()
        slot = self.free.pop()
        self.slot_of[request_id] = slot
        self.seed[slot] = self._derived_seed() if seed is None else seed
        self.arrivals += 1
        self.draws[:, slot] = 0
        self.ahead_from[:, slot] = _NONE
        self.kv[:, slot] = 0
        self.thresholds.total[:, slot] = 0
        self.thresholds.count[:, slot] = 0
        return slot

    def _derived_seed(self) -> int:
        digest = hashlib.blake2b(f"{self.engine_seed}:{self.arrivals}".encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "little", signed=True)

    def _grow(self) -> None:
        old = len(self.seed)
        new = max(16, 2 * old)
        self.seed = np.resize(self.seed, new)
        wider = ((0, 0), (0, new - old))
        self.kv = np.pad(self.kv, wider)
        self.draws = np.pad(self.draws, wider)
        self.ahead_from = np.pad(self.ahead_from, wider)
        self.ahead = np.pad(self.ahead, (*wider, (0, 0)))
        self.thresholds = EntropyThresholds(
            np.pad(self.thresholds.total, wider), np.pad(self.thresholds.count, wider)
        )
        self.pending.extend([None] * (new - old))
        self.free.extend(range(old, new))
