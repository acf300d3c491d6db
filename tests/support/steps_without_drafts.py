"""Engines whose steps draft in turns, and what their levels read in the steps between."""

import itertools

from vllm_hsd.tools.audit.mutants import replace

SPECULATOR = "vllm_hsd.host.speculator:CascadeSpeculator"


def install() -> None:
    """Proposals by recorded graphs; twelve of fifteen steps draft nothing."""
    from support import recorded_graph

    recorded_graph.serve()
    steps = itertools.count()

    def in_turns(longest, self, size):
        longest(self, size)
        return max(self.learned.lengths) if next(steps) % 15 < 3 else 0

    def with_prompts(ingest, self, batch, *args, with_logits=False):
        assert with_logits or batch.has_prefill, "a step of decodes ran a level without a graph"
        return ingest(self, batch, *args, with_logits=with_logits)

    replace("vllm_hsd.host.adaptive:LearnedLengths.__getitem__", in_turns)
    replace(f"{SPECULATOR}._ingest", with_prompts)


def leave_unread() -> None:
    """Steps without drafts leave the levels' caches alone."""
    replace(f"{SPECULATOR}._keep_up", lambda keep_up, *args: True)


def skip_passes() -> None:
    """Of a model next to a lookup two of three steps run the first pass alone."""
    turns = itertools.count(1)
    due = "vllm_hsd.budget.further_passes:FurtherPasses.due"
    replace(due, lambda due, self: next(turns) % 3 == 0)


def leave_first_passes_unread() -> None:
    """A first pass that runs alone gives a token and leaves the model's cache alone."""

    def noted(next_proposal, self, length):
        self.noted = next_proposal(self, length)
        return self.noted

    def unread(forward, self, state, *args):
        if not self.speculator.noted.every_pass:
            state.slot_mapping.fill_(-1)
        return forward(self, state, *args)

    replace(f"{SPECULATOR}._next_proposal", noted)
    replace("vllm_hsd.host.program_models:ProgramModel.forward", unread)
