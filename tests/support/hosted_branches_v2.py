"""Branches that a test chooses for the requests of an engine on the V2 runner, and faults of them.

What is called here runs in the engine's process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from support.engines import run_jobs
from support.hosted_branches import runner_of

from vllm_hsd.runner_v2 import branches as module


def run(llm, source: Any, jobs: dict, fault: str | None = None) -> tuple[dict, Counter]:
    """Results of `run_jobs` with drafts and branches of `source`, and what was seen."""
    runner = runner_of(llm)
    hosted, seen = runner.speculator.branches, Counter()
    originals = hosted.flat_drafts, hosted.finish

    def flat_drafts(slots, window, drafts):
        state, lookup, states = hosted.state, hosted.lookup, runner.req_states
        lengths = states.total_len.gpu[torch.from_numpy(slots).long()].tolist()
        for b, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
            most = int(state.requested[0, b])
            text = states.all_token_ids.gpu[slot, :length].tolist()
            found.update({"last": (slot, text)})
            chain = source.chain(text, most) if most else None
            if chain is not None:
                state.draft_length[b] = len(chain)
                state.draft_tokens[b, : len(chain)] = torch.tensor(chain, dtype=torch.int64)
            else:
                chain = state.draft_tokens[b, : state.draft_length[b]].tolist()
            rows = source.branches(text, most, chain, hosted.most - 1) if most else []
            for j in range(hosted.most - 1):
                own = rows[j] if j < len(rows) else []
                lookup.branch_counts[b, j] = len(own)
                lookup.branches[b, j, : len(own)] = torch.tensor(own, dtype=torch.int32)
        before = lookup.branch_counts[: len(slots)].sum(1)
        originals[0](slots, window, drafts)
        after = lookup.branch_counts[: len(slots)].sum(1)
        seen["one row"] += int(((before > 0) & (after == 0)).sum())

    def finish():
        step = hosted.step
        if step is not None:
            seen["groups"] = len(hosted.caches)
            batch, shown = hosted.shown
            of_rows = [batch.req_ids[i] for i in step.rows.request.tolist()]
            seen["misnamed"] += shown.req_ids != of_rows
            listed = step.batch.num_draft_tokens_per_req
            whole = hosted.most * (hosted.length + 1) - 1
            seen["cut"] += int(((listed > hosted.length) & (listed < whole)).sum())
            for i in np.flatnonzero(hosted.winner[: step.batch.num_reqs].numpy()):
                row = int(np.flatnonzero(step.rows.request.numpy() == i)[0])
                size = runner.cache_config.block_size
                seen["won"] += 1
                seen[f"won at {int(step.rows.base[row]) % size}"] += 1
        originals[1]()

    found: dict = {}
    hosted.flat_drafts, hosted.finish = flat_drafts, finish
    undo = FAULTS[fault](hosted) if fault else None
    try:
        results = run_jobs(llm, jobs)
        seen["last"] = found.get("last")
        return results, seen
    finally:
        hosted.flat_drafts, hosted.finish = originals
        if undo is not None:
            undo()


def difference_of_caches(llm, source: Any, none: Any, prompt: list[int], length: int):
    """As `hosted_branches.difference_of_caches`: (largest difference, steps that a branch won)."""
    runner, kept, won = runner_of(llm), [], 0
    for each, most in ((source, length), (none, 1)):
        llm.reset_prefix_cache()
        params = {"temperature": 0, "ignore_eos": True, "max_tokens": most}
        _, seen = run(llm, each, {"a": {"prompts": [prompt], "params": params}})
        slot, text = seen["last"]
        if not kept:
            prompt = text
        layers = runner.compilation_config.static_forward_context
        blocks = []
        for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            full = (len(prompt) - 1) // runner.block_tables.block_sizes[gid]
            table = runner.block_tables.block_tables[gid].gpu[slot, :full].long()
            for name in group.layer_names:
                cache = layers[name].kv_cache
                number = cache.shape.index(runner.kv_cache_config.num_blocks)
                blocks.append(cache.movedim(number, 0)[table].clone())
        kept.append(blocks)
        won += seen["won"]
    pairs = zip(*kept, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs), won


def _without(name: str) -> Callable[[Any], Callable[[], None]]:
    def put(hosted: Any) -> Callable[[], None]:
        old = getattr(module, name)
        setattr(module, name, lambda *_, **__: None)
        return lambda: setattr(module, name, old)

    return put


FAULTS: dict[str, Callable[[Any], Callable[[], None]]] = {
    "no copy of the text before a root": _without("copy_to_branches"),
    "no copy of what a branch computed": _without("copy_from_winners"),
}
