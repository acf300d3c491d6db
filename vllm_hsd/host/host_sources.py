"""A model or head next to lookups on a CPU: it drafts where no lookup has the better offer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_hsd.budget import clock
from vllm_hsd.budget.trials import Trials
from vllm_hsd.cascade.program import ProgramSources
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.cascade.vocabulary import readable
from vllm_hsd.host.host_program import HostProgram


class HostSources(HostProgram):
    """A `HostProgram` whose level 0 is a model with lookups next to it.

    Not with `adaptive`, where the model is a level above them (`config.defaults`).

    Attributes:
        lazy: level 0 reads only the texts for which it drafts.
    """

    sources: ProgramSources

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Of the model: what is known of it is as old as its last drafts.
        self.trials = Trials(1)
        self.lazy = self.schedule.num_levels == 1
        self.most_replaced = max(self.schedule.draft_lengths[0], 1)

    def _reads_all(self) -> bool:
        return not self.lazy and self.sources.drafter_selected()

    def _draft_by_passes(self, state: ProposalState, first: np.ndarray, rest: np.ndarray) -> None:
        begins = self.base + state.start[0].numpy()
        began = clock.seconds()
        self.sources.offer(state)
        self.counts.add_time(0, clock.seconds() - began)
        wants = rest & self._wants_model(state) & self._wants(state, 0)
        if self.lazy:
            wants &= ~self._read(0, wants)
        requested = state.requested[0].numpy()
        room = requested[unread := self.lazy & ~wants]
        requested[unread] = 0  # What it has not read a model does not draft for.
        # Below another level a first pass reads what that one has added.
        super()._draft_by_passes(state, first if self._reads_all() else wants, wants)
        requested[unread] = room
        self.sources.choose(state)
        replaced = self.sources.drawn.numpy()[self.slots] == 0
        computed = self.caches.computed[0, self.slots]
        self.caches.computed[0, self.slots] = np.where(
            replaced, np.minimum(computed, begins), computed
        )

    def _wants_model(self, state: ProposalState) -> np.ndarray:
        """bool [B], requests for which the model drafts; all of them in a trial."""
        if not self.sources.drafter_selected():
            return np.zeros(state.batch, dtype=bool)
        wants: np.ndarray = self.sources.prefers_drafter(state).numpy()
        if wants.any():
            self.trials.pays(0)
        elif self.trials.due(0):
            wants = np.ones_like(wants)
        return wants

    def _pass_on(self, state: ProposalState, level: int) -> None:
        super()._pass_on(state, level)
        if level == 1:
            self._keep_point_masses(state, self.sources.drawn.numpy()[self.slots] == 0)

    def _keep_point_masses(self, state: ProposalState, looked_up: np.ndarray) -> None:
        """Let tokens of a lookup that level 1 has passed on have rows of their own: bool [B]."""
        rows, lse = state.rows[1], state.lse[1]
        assert rows is not None
        for b in np.flatnonzero(looked_up & (state.origin.numpy() >= 0)).tolist():
            first, count, end = (int(x[b]) for x in (state.origin, state.drafted[0], state.end))
            token_ids = readable(state.window[b, end - count : end].long(), rows.shape[-1])
            own = slice(first, first + count)
            rows[b, own].fill_(-torch.inf).scatter_(1, token_ids[:, None], 0.0)
            lse[b, own] = 0.0
