"""Indices of ragged arrays: request after request, each with its own number of entries."""

from __future__ import annotations

import numpy as np


def ragged_arange(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts [2, 0, 3]: owners [0, 0, 2, 2, 2] and offsets [0, 1, 0, 1, 2]."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - np.repeat(ragged_starts(counts), counts)


def ragged_starts(counts: np.ndarray) -> np.ndarray:
    """For counts [2, 0, 3]: [0, 2, 2], the flat index at which each one begins."""
    starts: np.ndarray = np.cumsum(counts) - counts
    return starts


def last_positions(ends: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(owner i, position), each [sum(counts)], of the last counts[i] positions before ends[i]."""
    owners, offsets = ragged_arange(counts)
    return owners, (ends - counts)[owners] + offsets
