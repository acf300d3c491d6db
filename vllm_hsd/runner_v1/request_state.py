"""What drafting keeps about the requests of a V1 runner between steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_hsd.core.branches import BranchStore
from vllm_hsd.core.cascade import Cascade
from vllm_hsd.core.drafts import DraftStore, ragged_arange
from vllm_hsd.core.stopping import EntropyThresholds
from vllm_hsd.verify.rng import host_uniforms

# Uniforms of a request and level that are drawn at once: 256 cost hardly more than one. No step
# takes more than num_speculative_tokens + 1 <= 129.
_BUFFERED = 256
# Beyond any text.
NOTHING_KEPT = np.iinfo(np.int64).max
# Sentinel: nothing buffered.
_NONE = np.iinfo(np.int64).min // 2


@dataclass
class RequestState:
    """Arrays of S request slots, L levels; the slot is the last axis. See `RequestTable`.

    The noise of a coupled request belongs to a position of its text, see `runner_v1.noise`. Others
    draw by uniforms, keyed by (request seed, level, draw number), with a counter per request and
    level that only grows: a uniform keyed by position would be met again by the next step, after a
    block verification that had looked at it.

    Attributes:
        rows: [S] int64, row in the runner's batch.
        end: [S] int64, tokens in the text; grows with the draft.
        committed: [S] int64, tokens in the text without the draft.
        eos: [S] int64, token that ends the request, -1 for none.
        max_tokens: [S] int64, most tokens to generate.
        cached: [L, S] int64, positions whose KV entries are valid.
        filled: [L, S] int64, leading positions whose blocks are noted as filled, see `LazyCaches`.
        kept_from: [L, S] int64, first position whose state of the target a level has kept from
            earlier steps; `NOTHING_KEPT` for none.
        drafts: the drafts that wait for the target.
        branches: those that are verified beside them; None without branches.
        noise: [S] `RequestNoise` of coupled requests, None for the others.
        seed: [S] int64, see `verify.rng`.
        draws: [L + 1, S] int64, uniforms drawn by every level, and last by the target.
        buffered: [L + 1, S, n] float64 uniforms that are drawn ahead.
        buffered_from: [L + 1, S] int64, number of the first one's draw.
        thresholds: entropy thresholds per level and slot.
        learned: [..., S] float64 arrays of what the cascade has learned about each request.
    """

    rows: np.ndarray
    end: np.ndarray
    committed: np.ndarray
    eos: np.ndarray
    max_tokens: np.ndarray
    cached: np.ndarray
    filled: np.ndarray
    kept_from: np.ndarray
    drafts: DraftStore
    branches: BranchStore | None
    noise: np.ndarray
    seed: np.ndarray
    draws: np.ndarray
    buffered: np.ndarray
    buffered_from: np.ndarray
    thresholds: EntropyThresholds
    learned: list[np.ndarray]

    @classmethod
    def allocate(cls, cascade: Cascade) -> RequestState:
        """Arrays for as many requests as can have a draft of `cascade`."""
        levels, slots = len(cascade.levels), len(cascade.top)

        def whole(*shape: int) -> np.ndarray:
            return np.zeros(shape, dtype=np.int64)

        return cls(
            rows=whole(slots),
            end=whole(slots),
            committed=whole(slots),
            eos=whole(slots),
            max_tokens=whole(slots),
            cached=whole(levels, slots),
            filled=whole(levels, slots),
            kept_from=np.full((levels, slots), NOTHING_KEPT),
            drafts=cascade.drafts[-1],
            branches=cascade.branches,
            noise=np.full(slots, None),
            seed=whole(slots),
            draws=whole(levels + 1, slots),
            buffered=np.zeros((levels + 1, slots, _BUFFERED)),
            buffered_from=np.full((levels + 1, slots), _NONE),
            thresholds=EntropyThresholds.fresh(levels, slots),
            learned=cascade.learned,
        )

    def forget(self, slot: int) -> None:
        """The slot is free: everything is as `allocate` gives it."""
        self.buffered_from[:, slot] = _NONE
        for array in self._lasting():
            array[..., slot] = 0
        self.noise[slot] = None
        self.enter(slot, 0)

    def enter(self, slot: int, num_cached: int | np.ndarray) -> None:
        """The slot's request enters the batch, with so many valid KV entries of each level."""
        self.cached[:, slot] = num_cached
        self.filled[:, slot] = 0
        self.kept_from[:, slot] = NOTHING_KEPT
        self.drafts.clear(slot)
        if self.branches is not None:
            self.branches.clear(slot)

    def set_aside(self, slot: int) -> list[np.ndarray]:
        """What must outlive the loss of the slot."""
        return [array[..., slot].copy() for array in self._lasting()]

    def restore(self, slot: int, kept: list[np.ndarray]) -> None:
        """A request is back, in any slot, with what `set_aside` returned."""
        for array, own in zip(self._lasting(), kept, strict=True):
            array[..., slot] = own

    def _lasting(self) -> list[np.ndarray]:
        thresholds = self.thresholds
        own = [self.seed, self.draws, thresholds.total, thresholds.count, self.noise]
        return own + self.learned

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

    def take_draws(
        self, slots: np.ndarray, count: int, stream: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seeds and first draws, [n] int64, of as many uniforms for kernels; see `uniforms`."""
        draws = self.draws[stream, slots]
        self.draws[stream, slots] += count
        return self.seed[slots], draws

    def _refill(self, slots: np.ndarray, stream: int) -> None:
        draws = self.draws[stream, slots]
        self.buffered_from[stream, slots] = draws
        self.buffered[stream, slots] = host_uniforms(
            self.seed[slots, None], np.array(stream), draws[:, None] + np.arange(_BUFFERED)
        )
