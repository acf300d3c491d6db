"""Engines whose steps draft in turns, and what their levels read in the steps between."""

import itertools


def install() -> None:
    """Proposals by recorded graphs; twelve of fifteen steps draft nothing."""
    from support import recorded_graph

    from vllm_hsd.host.adaptive import LearnedLengths
    from vllm_hsd.host.speculator import CascadeSpeculator

    recorded_graph.serve()
    longest, steps = LearnedLengths.__getitem__, itertools.count()

    def in_turns(self, size):
        longest(self, size)
        return max(self.learned.lengths) if next(steps) % 15 < 3 else 0

    LearnedLengths.__getitem__ = in_turns
    ingest = CascadeSpeculator._ingest

    def with_prompts(self, batch, *args, with_logits=False):
        assert with_logits or batch.has_prefill, "a step of decodes ran a level without a graph"
        return ingest(self, batch, *args, with_logits=with_logits)

    CascadeSpeculator._ingest = with_prompts


def leave_unread() -> None:
    """Steps without drafts leave the levels' caches alone."""
    from vllm_hsd.host.speculator import CascadeSpeculator

    CascadeSpeculator._keep_up = lambda self, *args: True


def skip_passes() -> None:
    """Of a model next to a lookup two of three steps run the first pass alone."""
    from vllm_hsd.budget.further_passes import FurtherPasses

    turns = itertools.count(1)
    FurtherPasses.due = lambda self: next(turns) % 3 == 0


def leave_first_passes_unread() -> None:
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
