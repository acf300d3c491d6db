"""Keeps an EAGLE-3 head's cache in step with the text, whatever vLLM does with a request."""

from __future__ import annotations

import numpy as np

from vllm_hsd.runner_v1.eagle3 import Eagle3Level
from vllm_hsd.runner_v1.request_state import NOTHING_KEPT, RequestState


class HeadStates:
    """What a head in a cascade has read of every request.

    Args:
        head: the head.
        k: its place among the cascade's levels.
        requests: the state of the cascade's requests.
    """

    def __init__(self, head: Eagle3Level, k: int, requests: RequestState) -> None:
        self.head, self.k, self.requests = head, k, requests

    def before_drafting(self, slots: np.ndarray) -> None:
        """Pass over positions that the head has not read and whose states are gone.

        Args:
            slots: [n] int64, in the order of the runner's batch.
        """
        k, requests = self.k, self.requests
        has_from = np.minimum(self.head.first[: len(slots)], requests.kept_from[k, slots])
        requests.cached[k, slots] = np.maximum(requests.cached[k, slots], has_from + 1)

    def after_drafting(self, slots: np.ndarray, known: np.ndarray) -> None:
        """Keep the last states of the requests that the head did not run for.

        Args:
            slots: see `before_drafting`.
            known: [n] int64, tokens that the head can be fed now.
        """
        head, k, requests = self.head, self.k, self.requests
        # Entries of drafts were computed without the target's states.
        cached = requests.cached[k, slots] = np.minimum(requests.cached[k, slots], known)
        rows = np.flatnonzero((cached < known) & (known <= head.context_length))
        requests.kept_from[k, slots] = NOTHING_KEPT
        requests.kept_from[k, slots[rows]] = head.keep(rows, np.maximum(cached[rows] - 1, 0))
