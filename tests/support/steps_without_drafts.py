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
