"""What several drawn drafts of an engine come to, and faults of them.

What is called here runs in the engine's process.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any
from unittest import mock

from support.engines import run_jobs
from support.hosted_branches import cached_blocks, largest_difference, runner_of, texts_of

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
    "all rows by the same uniforms": mock.patch.object(program, "sample_row", _same_uniforms),
    "drafts' rows of another place": mock.patch.object(*VERIFIES, _of_another_place),
    "target's rows of another draft": mock.patch.object(*VERIFIES, _of_another_row),
}


def run(llm, work) -> tuple[dict[str, Any], Counter]:
    """Results of `run_jobs`, and how many steps a row after the chain won.

    Args:
        work: (jobs, fault or None).
    """
    (jobs, fault), speculator, seen = work, runner_of(llm).speculator, Counter()
    hosted, propose = speculator.branches, speculator._next_proposal
    finish = hosted.finish

    def noted(length):
        proposal = propose(length)
        seen["chains"] += not proposal.every_pass
        return proposal

    def finished():
        if hosted.step is not None:
            count = hosted.step.batch.num_reqs
            seen["won"] += int((hosted.winner[:count] > 0).sum())
            seen["several"] += int((hosted.counts[:count, 1:] > 0).any(1).sum())
            whole = hosted.most * (hosted.length + 1) - 1
            listed = hosted.step.batch.num_draft_tokens_per_req
            seen["cut"] += int(((listed > hosted.length) & (listed < whole)).sum())
        finish()

    with (
        mock.patch.object(hosted, "finish", finished),
        mock.patch.object(speculator, "_next_proposal", noted),
        FAULTS[fault] if fault else contextlib.nullcontext(),
    ):
        return run_jobs(llm, jobs), seen


def recorded(llm, jobs: dict) -> dict[tuple[int, ...], list[list[int]]]:
    """Text -> the rows that were drafted after it, the chain first."""
    runner = runner_of(llm)
    hosted, found = runner.speculator.branches, {}
    flat_drafts = hosted.flat_drafts

    def noted(slots, window, drafts):
        state, lookup = hosted.state, hosted.lookup
        for b, text in enumerate(texts_of(runner, slots)):
            rows = [state.draft_tokens[b, : state.draft_length[b]].tolist()]
            for tokens, count in zip(lookup.branches[b], lookup.branch_counts[b], strict=True):
                rows.append(tokens[:count].tolist())
            found[tuple(text)] = rows
        flat_drafts(slots, window, drafts)

    with mock.patch.object(hosted, "flat_drafts", noted):
        run_jobs(llm, jobs)
    return found


def difference_of_caches(llm, work) -> tuple[float, int]:
    """(largest difference of a sampled request's keys and values from new ones, steps that won).

    Of the target all that fills whole blocks, of the drafter what its first pass reads no more.

    Args:
        work: (prompt, sampling parameters, fault that keeps the chain's entries).
    """
    prompt, params, faulty = work
    runner = runner_of(llm)
    hosted, kept, found = runner.speculator.branches, [], {}
    flat_drafts = hosted.flat_drafts

    def noted(slots, window, drafts):
        found.update(slot=int(slots[0]), text=texts_of(runner, slots[:1])[0])
        flat_drafts(slots, window, drafts)

    hosted.flat_drafts = noted
    seen: Counter = Counter()
    for most in (params["max_tokens"], 1):
        llm.reset_prefix_cache()
        job = {"a": {"prompts": [prompt], "params": {**params, "max_tokens": most}}}
        copy = "vllm_hsd.host.branch_caches.copy_from_winners"
        with mock.patch(copy) if faulty and not kept else contextlib.nullcontext():
            _, each = run(llm, (job, None))
        seen += each
        prompt = found["text"] if not kept else prompt
        kept.append(cached_blocks(runner, found["slot"], len(prompt) - LENGTH - 2))
    return largest_difference(kept), seen["won"]


def allow_several_to_two() -> None:
    """Three requests draft a chain each, and four nothing."""
    from vllm_hsd.config import sizes
    from vllm_hsd.host import speculator

    for module in (sizes, speculator):
        module.most_with_branches = lambda hsd: 2
    sizes.MAX_BATCH_SIZE = 3
