"""Which passes a model or a head next to lookups ran in an engine, and a fault of skipping them."""

import itertools
from unittest import mock

from support import engines


def run(llm, jobs: dict[str, dict]) -> dict:
    """The jobs of one request each, with the "steps" that drafted.

    (whether all passes ran, length of the text, whether the draft is the model's, the draft).
    """
    from vllm_hsd.budget.further_passes import FurtherPasses
    from vllm_hsd.host.head_sources import HeadSources
    from vllm_hsd.host.speculator import CascadeSpeculator

    due, decided, steps = FurtherPasses.due, [], []

    def deciding(self):
        decided.append(due(self))
        return decided[-1]

    def recorded(propose):
        def record(self, batch, *args, **kwargs):
            decided.clear()
            drafts = propose(self, batch, *args, **kwargs)
            if decided and (count := int(self.state.draft_length[0])):
                slot = int(batch.idx_mapping[0])
                length = int(self.req_states.total_len.gpu[slot])
                draft = self.state.draft_tokens[0, :count].tolist()
                steps.append((decided[0], length, bool(self.lookup.drawn[slot]), draft))
            return drafts

        return record

    results = {}
    with (
        mock.patch.object(FurtherPasses, "due", deciding),
        mock.patch.object(HeadSources, "propose", recorded(HeadSources.propose)),
        mock.patch.object(CascadeSpeculator, "propose", recorded(CascadeSpeculator.propose)),
    ):
        for name, job in jobs.items():
            results[name] = {**engines.run_job(llm, **job), "steps": steps.copy()}
            steps.clear()
    return results


def install() -> None:
    """Short matches, of which each length is a program; long enough for whole drafts."""
    from vllm_hsd.cascade import suffix_lookup

    suffix_lookup.DEPTH = 16


def install_turns() -> None:
    from vllm_hsd.budget.further_passes import FurtherPasses

    turns = itertools.count(1)
    FurtherPasses.due = lambda self: next(turns) % 3 == 0


def install_all() -> None:
    from vllm_hsd.budget.further_passes import FurtherPasses

    FurtherPasses.due = lambda self: True


def leave_unread() -> None:
    """A first pass that runs alone gives a token and leaves the model's cache alone."""
    from vllm_hsd.host.program_models import ProgramModel
    from vllm_hsd.host.speculator import CascadeSpeculator

    next_proposal, forward = CascadeSpeculator._next_proposal, ProgramModel.forward

    def noted(self, length):
        self.noted = next_proposal(self, length)
        return self.noted

    def unread(self, state, *args):
        if not self.speculator.noted.every_pass:
            state.slot_mapping.fill_(-1)
        return forward(self, state, *args)

    CascadeSpeculator._next_proposal, ProgramModel.forward = noted, unread
