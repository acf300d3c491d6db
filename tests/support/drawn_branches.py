"""What several drawn drafts of an engine come to, and faults of them, in the engine's process."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any
from unittest import mock

from support import hosted_branches
from support.engines import run_jobs
from support.hosted_branches import compare_caches, runner_of, watched

from vllm_hsd.cascade import program
from vllm_hsd.host import drawn_branches
from vllm_hsd.kernels.drawn_rows import verify_drawn_rows
from vllm_hsd.kernels.sample_row import sample_row

LENGTH = 4


def _same_uniforms(logits, *state, draw_offset, **options):
    """All rows are drawn with those of the chain, so they are equal."""
    return sample_row(logits, *state, draw_offset=draw_offset % LENGTH, **options)


def _of_another_place(target, chain, further, *rest, **options):
    """Tokens carry the logits that the token before was drawn from."""
    return verify_drawn_rows(target, chain.roll(1, 1), further.roll(1, 2), *rest, **options)


def _of_another_row(target, chain, further, inputs, cu, *rest, **options):
    """The target's rows of the further drafts are those of the chain."""
    target, each = target.clone(), LENGTH + 1
    for begin, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        for first in range(begin + each, end - each + 1, each):
            target[first : first + each] = target[begin : begin + each]
    return verify_drawn_rows(target, chain, further, inputs, cu, *rest, **options)


VERIFIES = drawn_branches, "verify_drawn_rows"
FAULTS = {
    **hosted_branches.FAULTS,
    "all rows by the same uniforms": mock.patch.object(program, "sample_row", _same_uniforms),
    "drafts' rows of another place": mock.patch.object(*VERIFIES, _of_another_place),
    "target's rows of another draft": mock.patch.object(*VERIFIES, _of_another_row),
}


def run(llm, work) -> tuple[dict[str, Any], Counter]:
    """Results of (jobs, fault or None), and what `watched` has seen; "chains": proposals of one."""
    (jobs, fault), runner = work, runner_of(llm)
    propose = runner.speculator._next_proposal

    def noted(length):
        proposal = propose(length)
        seen["chains"] += not proposal.every_pass
        return proposal

    with (
        watched(runner) as seen,
        mock.patch.object(runner.speculator, "_next_proposal", noted),
        # In pieces of four requests.
        mock.patch.object(drawn_branches, "MOST_BYTES", 0),
        FAULTS[fault] if fault else contextlib.nullcontext(),
    ):
        return run_jobs(llm, jobs), seen


def difference_of_caches(llm, work) -> tuple[float, int]:
    """`compare_caches` of sampled text, without what the drafter's first pass reads again."""
    prompt, params, faulty = work  # Whether the target keeps the chain's entries.
    faults = "no copy of what a branch computed" if faulty else None, None
    runs = [lambda jobs, fault=fault: run(llm, (jobs, fault)) for fault in faults]
    return compare_caches(llm, prompt, params, runs, unread=LENGTH + 2)


def allow_several_to_two() -> None:
    """Three requests draft a chain each, and four nothing."""
    from vllm_hsd.config import sizes
    from vllm_hsd.host import speculator

    for module in (sizes, speculator):
        module.most_with_branches = lambda hsd: 2
    sizes.MAX_BATCH_SIZE = 3
