"""Choices that switch levels and sources in and out all the time, to break what must not break."""

import zlib
from itertools import combinations

import numpy as np

from vllm_hsd.core.controller import DepthController
from vllm_hsd.core.levels import Selection
from vllm_hsd.core.prices import PriceEstimates, Prices


def install() -> None:
    """Replace the controller's choice and all learned prices in this process."""
    DepthController.choose = _choose
    PriceEstimates.prices = _prices


def install_and_forget_holes() -> None:
    """As `install`; levels also believe that they have filled every block of a prefix hit."""
    install()
    _forget_holes()


def install_free_drafts() -> None:
    """Drafts cost nothing, except for requests that must repeat."""
    PriceEstimates.prices = lambda self, *_: Prices(np.zeros(self.length + 1), 0.0)


def install_free_drafts_and_forget_holes() -> None:
    """As `install_free_drafts`, with the fault of `install_and_forget_holes`."""
    install_free_drafts()
    _forget_holes()


def _forget_holes() -> None:
    from vllm_hsd.runner_v1.lazy_caches import FilledBlocks

    FilledBlocks.usable = lambda self, blocks, length: np.full(len(self.filled), length)


def _choose(self: DepthController, slots: np.ndarray, most: np.ndarray):
    self.step += 1
    bits = zlib.crc32(str(self.step).encode())
    places = range(len(self.draft_lengths))
    subsets = [s for n in range(len(places) + 1) for s in combinations(places, n)]
    levels = subsets[bits % len(subsets)]
    lengths = tuple(1 + (bits >> (8 + k)) % self.draft_lengths[k] for k in levels)
    # Some requests draft less than the others, some nothing.
    own = (np.arange(len(slots)) * 7 + self.step) % (lengths[-1] + 1 if levels else 1)
    return Selection(levels, lengths), np.minimum(most, own)


def _prices(self: PriceEstimates, verifier: int, size: int, drafter_cost: float) -> Prices:
    """Sometimes nothing is worth its price, sometimes everything is, often it depends."""
    self.idle[verifier] += 1
    bits = zlib.crc32(f"{verifier}, {self.idle[verifier]}".encode())
    token, forward = (0.0, 0.05, 0.3, 1.0)[bits % 4], (0.0, 0.1, 0.5, 2.0)[bits // 4 % 4]
    return Prices(token * np.arange(self.length + 1.0), size * forward, size)


def install_for_batches() -> None:
    """Replace the choice of one draft length for a whole batch in this process."""
    from vllm_hsd.core.batch_draft_length import BatchDraftLength

    def choose(self: BatchDraftLength, size: int) -> int:
        self.rested += 1
        return self.draft_length * (zlib.crc32(str(self.rested).encode()) % 3 > 0)

    BatchDraftLength.choose = choose
