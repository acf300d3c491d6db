"""What lookups of the reference and the planner are, and the texts that they read."""

from __future__ import annotations

import sys
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from vllm_hsd.cascade.level import LookupResult

UNLIMITED = sys.maxsize


class Texts(NamedTuple):
    """Texts of a batch of requests: `tokens[rows[i], : ends[i]]` of the one in slots[i].

    Attributes:
        tokens: [table rows, max length] int32.
        rows, slots, ends: [batch] int64.
    """

    tokens: np.ndarray
    rows: np.ndarray
    slots: np.ndarray
    ends: np.ndarray


@runtime_checkable
class LookupLevel(Protocol):
    """A source of the lowest level that finds its drafts in texts: proposals are point masses.

    One that keeps nothing of a request inherits `read` and `forget`, which do nothing.
    """

    def read(self, texts: Texts) -> None:
        """Take in committed texts."""
        return

    def lookup(self, texts: Texts, requested: np.ndarray) -> LookupResult:
        """Continue each text by at most requested[i] tokens.

        Its end may be unverified; `read` has seen the committed part.
        """

    def forget(self, slot: int) -> None:
        """The slot's request has ended, or gives its slot up."""
        return
