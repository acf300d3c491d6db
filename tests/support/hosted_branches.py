"""Branches that a test chooses in the process of an engine, and faults of hosting them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from support.engines import run_jobs

from vllm_hsd.host import branch_caches, branches
from vllm_hsd.kernels.branch_walk import follow_branches


def runner_of(llm) -> Any:
    """The model runner of an engine in this process."""
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


class Oracle:
    """Drafts that follow known texts up to a random place, and are wrong after it."""

    def __init__(self, texts: list[list[int]], vocabulary: int, seed: int) -> None:
        self.texts, self.vocabulary = texts, vocabulary
        self.random = np.random.default_rng(seed)

    def chain(self, text: list[int], most: int) -> list[int]:
        """A draft of at most `most` tokens."""
        known = next((each for each in self.texts if each[: len(text)] == text), text)
        draft = known[len(text) : len(text) + most]
        right = int(self.random.integers(0, len(draft) + 1))
        junk = self.random.integers(2, self.vocabulary, most).tolist()
        return (draft[:right] + junk)[: int(self.random.integers(0, most + 1))]

    def branches(self, text: list[int], most: int, chain: list[int], rows: int) -> list[list[int]]:
        """`rows` more drafts of at most `most` tokens."""
        return [self.chain(text, most) for _ in range(rows)]


class AsOffered:
    """What the levels and their rule offer."""

    def chain(self, text: list[int], most: int) -> None:
        """The levels' own."""

    def branches(self, text: list[int], most: int, chain: list[int], rows: int) -> Any:
        """The levels' own."""


class Avoiding(AsOffered):
    """Branches that follow from the text, and from the chain's tokens, which they avoid."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def branches(self, text: list[int], most: int, chain: list[int], rows: int) -> list[list[int]]:
        """Some begin with the chain's first token; all leave it early."""
        size, last = self.vocabulary, text[-1]
        tail = [(3 * last + text[0] + 2 * d) % size for d in range(most)]
        firsts = [t for t in range(last, last + size) if t % size not in chain[:1]]
        found = [[first % size, *tail] for first in firsts]
        if len(chain) > 1:
            found.insert(1, [chain[0], (chain[1] + 1) % size, *tail])
        return [branch[:most] for branch in found[:rows]]


class NoBranches(AsOffered):
    def branches(self, text: list[int], most: int, chain: list[int], rows: int) -> list[list[int]]:
        return []


def texts_of(runner: Any, slots: np.ndarray) -> list[list[int]]:
    """Tokens of the requests in some slots of a runner."""
    states = runner.req_states
    lengths = states.total_len.gpu[torch.from_numpy(slots).long()].tolist()
    texts = zip(slots.tolist(), lengths, strict=True)
    return [states.all_token_ids.gpu[slot, :length].tolist() for slot, length in texts]


def cached_blocks(runner: Any, slot: int, length: int) -> list[torch.Tensor]:
    """What the full blocks of a request's first `length` tokens hold, layer by layer."""
    layers, blocks = runner.compilation_config.static_forward_context, []
    for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        full = length // runner.block_tables.block_sizes[gid]
        table = runner.block_tables.block_tables[gid].gpu[slot, :full].long()
        for name in group.layer_names:
            cache = layers[name].kv_cache
            number = cache.shape.index(runner.kv_cache_config.num_blocks)
            blocks.append(cache.movedim(number, 0)[table].clone())
    return blocks


@contextlib.contextmanager
def watched(runner: Any) -> Iterator[Counter]:
    """What becomes of the rows of an engine's steps; "last": a request's slot and its text."""
    hosted, seen = runner.speculator.branches, Counter()
    flat_drafts, finish = hosted.flat_drafts, hosted.finish

    def drafted(slots, window, drafts):
        for last in zip(slots.tolist(), texts_of(runner, slots), strict=True):
            seen["last"] = last
        flat_drafts(slots, window, drafts)

    def finished():
        step = hosted.step
        if step is not None:
            count, size = step.batch.num_reqs, runner.cache_config.block_size
            seen["groups"] = len(hosted.caches.groups)
            seen["rows"] = max(seen["rows"], 1 + int(step.rows.branch.max()))
            seen["several"] += int((hosted.counts[:count, 1:] > 0).any(1).sum())
            batch, shown = hosted.shown
            of_rows = [batch.req_ids[i] for i in step.rows.request.tolist()]
            seen["misnamed"] += shown.req_ids != of_rows
            listed = step.batch.num_draft_tokens_per_req
            whole = hosted.most * (hosted.length + 1) - 1
            seen["cut"] += int(((listed > hosted.length) & (listed < whole)).sum())
            for i in np.flatnonzero(hosted.winner[:count].numpy()):
                row = int(np.flatnonzero(step.rows.request.numpy() == i)[0])
                seen["won"] += 1
                seen[f"won at {int(step.rows.base[row]) % size}"] += 1
        finish()

    with mock.patch.multiple(hosted, flat_drafts=drafted, finish=finished):
        yield seen


def run(llm, source: Any, jobs: dict, fault: str | None = None) -> tuple[dict, Counter]:
    """Results of `run_jobs` with drafts and branches of `source`, and what `watched` has seen.

    "one row": requests whose branches were all cut; "lookahead": of vLLM's scheduler.
    """
    runner = runner_of(llm)
    hosted, scheduler = runner.speculator.branches, llm.llm_engine.engine_core.engine_core.scheduler

    def offered(slots, window, drafts):
        state, lookup = hosted.state, hosted.lookup
        for b, text in enumerate(texts_of(runner, slots)):
            most = int(state.requested[0, b])
            chain = source.chain(text, most) if most else None
            if chain is not None:
                state.draft_length[b] = len(chain)
                state.draft_tokens[b, : len(chain)] = torch.tensor(chain, dtype=torch.int64)
            else:
                chain = state.draft_tokens[b, : state.draft_length[b]].tolist()
            rows = source.branches(text, most, chain, hosted.most - 1) if most else []
            for j in range(0 if rows is None else hosted.most - 1):
                own = rows[j] if j < len(rows) else []
                lookup.branch_counts[b, j] = len(own)
                lookup.branches[b, j, : len(own)] = torch.tensor(own, dtype=torch.int32)
        before = lookup.branch_counts[: len(slots)].sum(1)
        flat_drafts(slots, window, drafts)
        after = lookup.branch_counts[: len(slots)].sum(1)
        seen["one row"] += int(((before > 0) & (after == 0)).sum())

    with watched(runner) as seen:
        flat_drafts = hosted.flat_drafts
        with (
            mock.patch.object(hosted, "flat_drafts", offered),
            FAULTS[fault] if fault else contextlib.nullcontext(),
        ):
            results = run_jobs(llm, jobs)
    seen["lookahead"] = scheduler.num_lookahead_tokens
    return results, seen


def difference_of_caches(llm, source: Any, prompt: list[int], length: int) -> tuple[float, int]:
    """Compare what requests with branches leave in the caches with a prefill of the same text."""
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": length}
    runs = [partial(run, llm, each) for each in (source, NoBranches())]
    return compare_caches(llm, prompt, params, runs)


def compare_caches(
    llm, prompt: list[int], params: dict, runs: list[Callable], unread: int = 1
) -> tuple[float, int]:
    """(largest difference of the entries of all full blocks and layers; steps that a branch won).

    Args:
        runs: each runs jobs; the second has the whole text of the first as its prompt.
        unread: last tokens of the text that are not compared.
    """
    runner, kept, won = runner_of(llm), [], 0
    # vLLM 0.33 drafts nothing after a request's only token.
    for run, most in zip(runs, (params["max_tokens"], 2), strict=True):
        llm.reset_prefix_cache()
        _, seen = run({"a": {"prompts": [prompt], "params": {**params, "max_tokens": most}}})
        slot, text = seen["last"]
        prompt = prompt if kept else text
        kept.append(cached_blocks(runner, slot, len(prompt) - unread))
        won += seen["won"]
    apart = (float((one - other).abs().max()) for one, other in zip(*kept, strict=True))
    return max(apart), won


def _one_row_off(chain, logits, *rest, **options):
    return follow_branches(chain, logits.roll(1, 0), *rest, **options)


FAULTS = {
    "no copy of the text before a root": mock.patch.object(branch_caches, "copy_to_branches"),
    "no copy of what a branch computed": mock.patch.object(branch_caches, "copy_from_winners"),
    "tokens drawn one row off": mock.patch.object(branches, "follow_branches", _one_row_off),
}
