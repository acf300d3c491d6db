"""Keeps an EAGLE-3 head's cache in step with the text, whatever vLLM does with a request."""

from __future__ import annotations

import numpy as np
from vllm.logger import init_logger

from vllm_hsd.core.cascade import Cascade
from vllm_hsd.core.counters import Count
from vllm_hsd.core.levels import DraftBatch
from vllm_hsd.runner_v1.eagle3 import Eagle3Level
from vllm_hsd.runner_v1.request_state import NOTHING_KEPT, RequestState

logger = init_logger(f"vllm.{__name__}")


class HeadStates:
    """What a head in a cascade has read of every request.

    Args:
        head: the head.
        k: its place among the cascade's levels.
        number: its number among the user's levels, for messages.
        cascade: the cascade in use.
        requests: the state of the cascade's requests.
    """

    def __init__(
        self, head: Eagle3Level, k: int, number: int, cascade: Cascade, requests: RequestState
    ) -> None:
        self.head, self.k, self.number = head, k, number
        self.cascade, self.requests = cascade, requests

    def before_drafting(self, batch: DraftBatch, slots: np.ndarray, known: np.ndarray) -> None:
        """Find out for which requests the head has all entries before this step's positions.

        Those of requests that were there in the last step are in its cache or kept. Those of others
        are in shared blocks of the prefix cache, or the target's states for them are gone.

        Args:
            batch: the step's requests.
            slots: [n] int64, in the order of the runner's batch.
            known: [levels, n] int64, tokens that each level can be fed now.
        """
        head, k, requests = self.head, self.k, self.requests
        first = head.first[: len(slots)]
        takes_part = ~requests.sits_out[k, slots] & (known[k] <= head.context_length)
        head.mark_computed(batch.tokens, np.flatnonzero(takes_part))
        has_from = np.minimum(first, requests.kept_from[k, slots])
        unsure = takes_part & (np.maximum(requests.cached[k, slots] - 1, 0) < has_from)
        if not unsure.any():
            return
        found = unsure.copy()
        # Blocks are shared: dropping one request can invalidate another: iterate to a fixed point.
        while lost := [
            row for row in np.flatnonzero(found) if not head.prefix_is_valid(batch.tokens, row)
        ]:
            found[lost] = False
            for row in lost:
                head.unmark(row)
            self._sit_out(slots[lost])
        requests.cached[k, slots[found]] = first[found] + 1
        # Such a request may share blocks with one of this step: the prefixes come first.
        self._feed(batch, slots, known[k] - 1)

    def after_drafting(self, batch: DraftBatch, slots: np.ndarray, known: np.ndarray) -> None:
        """Keep the states of requests that the head did not run for, or run it where it must.

        Args: see `before_drafting`.
        """
        head, k, requests = self.head, self.k, self.requests
        # Entries of drafts were computed without the target's states.
        requests.cached[k, slots] = np.minimum(requests.cached[k, slots], known[k])
        lagging = ~requests.sits_out[k, slots] & (known[k] <= head.context_length)
        rows = np.flatnonzero(lagging & (requests.cached[k, slots] < known[k]))
        entries = np.maximum(requests.cached[k, slots[rows]] - 1, 0)
        # One pass for all as soon as one must: a pass costs more than the tokens in it.
        now = np.full(len(rows), head.must_catch_up(rows, entries).any())
        self._feed(batch, slots[rows[now]], known[k, rows[now]])
        head.keep(rows[~now], entries[~now])
        requests.kept_from[k, slots] = NOTHING_KEPT
        requests.kept_from[k, slots[rows[~now]]] = entries[~now]

    def _feed(self, batch: DraftBatch, slots: np.ndarray, end: np.ndarray) -> None:
        """Feed the head, and no other level, up to end[i] tokens of the request in slots[i]."""
        ends = np.zeros((len(self.cascade.levels), len(slots)), dtype=np.int64)
        ends[self.k] = end
        self.cascade.models.ingest(batch, slots, ends)

    def _sit_out(self, slots: np.ndarray) -> None:
        self.requests.sits_out[self.k, slots] = True
        self.cascade.counters.rows[self.k, Count.sat_out] += len(slots)
        logger.warning_once(
            "levels[%d] drafts nothing for a request whose prefix it has not read: the target's "
            "states of these tokens are gone. /metrics counts such requests as "
            "vllm_hsd:level_sat_out.",
            self.number,
        )
