"""Faults of drawing and verifying several drafts of a model; called in the engine's process."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from support.engines import run_jobs
from support.hosted_branches import runner_of

from vllm_hsd.verify.branches import verify_rows


def _shared(lowest: Any):
    """`_uniforms` of a `SeveralDrafts` that gives all rows of a step the same ones."""
    original, last = lowest._uniforms, {}

    def uniforms(batch, slots, most):
        key = batch.end[slots].tobytes() + most.tobytes()
        if last.get("key") != key:
            last["key"], last["found"] = key, original(batch, slots, most)
        return last["found"]

    return mock.patch.object(lowest, "_uniforms", uniforms)


def _of_another_node(target, draft, rows, *args):
    """The target's rows of all drafts but the first are those of the places before."""
    target, second = target.clone(), len(rows[0]) + 1
    target[second + 1 :] = target[second:-1].clone()
    return verify_rows(target, draft, rows, *args)


FAULTS = ("all rows by the same uniforms", "rows of another node")


def run(llm, jobs: dict, fault: str | None = None, by_kernels: bool = False) -> dict[str, Any]:
    """Results of `run_jobs`; `by_kernels`: as on a GPU."""
    with contextlib.ExitStack() as patches:
        if by_kernels:
            # Not at the top: it imports the interpreter.
            from support.interpreter import repair

            repair()
            sampler = "vllm_hsd.runner_v1.branch_sampler.BranchSampler._has_kernels"
            patches.enter_context(mock.patch(sampler, lambda *_: True))
        if fault == FAULTS[0]:
            patches.enter_context(_shared(runner_of(llm).drafter.cascade.lowest))
        elif fault is not None:
            verify = "vllm_hsd.runner_v1.branch_sampler.verify_rows"
            patches.enter_context(mock.patch(verify, _of_another_node))
        return run_jobs(llm, jobs)


def recorded(llm, jobs: dict) -> dict[tuple[int, ...], list[list[int]]]:
    """Text -> the rows that were drafted after it, the chain first."""
    proposer = runner_of(llm).drafter
    cascade, found = proposer.cascade, {}
    original, store = cascade.propose, cascade.branches

    def propose(batch, slots, requested):
        drafts = original(batch, slots, requested)
        for slot in slots.tolist():
            text = batch.tokens[batch.rows[slot], : proposer.requests.committed[slot]].tolist()
            rows = [drafts.token_ids[slot, : drafts.counts[slot]].tolist()]
            for tokens, count in zip(store.token_ids[slot], store.counts[slot], strict=True):
                rows.append(tokens[:count].tolist())
            found[tuple(text)] = rows
        return drafts

    with mock.patch.object(cascade, "propose", propose):
        run_jobs(llm, jobs)
    return found
