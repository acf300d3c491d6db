"""Branches that a test chooses for the requests of an engine, and faults of hosting them.

What is called here runs in the engine's process.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from support.engines import run_jobs

from vllm_hsd.core import row_layout


def runner_of(llm) -> Any:
    """The model runner of an engine in this process."""
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


class Oracle:
    """Drafts that follow known texts up to a random place, and are wrong after it.

    Args:
        texts: prompts with their continuations.
        vocabulary: tokens.
        seed: of the places.
        chains: whether the chains are such drafts, in place of the levels' own.
    """

    def __init__(
        self, texts: list[list[int]], vocabulary: int, seed: int, chains: bool = True
    ) -> None:
        self.texts, self.vocabulary, self.chains = texts, vocabulary, chains
        self.random = np.random.default_rng(seed)

    def chain(self, text: list[int], most: int) -> list[int] | None:
        """A draft of at most `most` tokens; None for the levels'."""
        return self._draft(text, most) if self.chains else None

    def branches(self, text: list[int], most: int, chain: list[int], rows: int) -> list[list[int]]:
        """`rows` more drafts of at most `most` tokens."""
        return [self._draft(text, most) for _ in range(rows)]

    def _draft(self, text: list[int], most: int) -> list[int]:
        known = next((each for each in self.texts if each[: len(text)] == text), text)
        draft = known[len(text) : len(text) + most]
        right = int(self.random.integers(0, len(draft) + 1))
        junk = self.random.integers(2, self.vocabulary, most).tolist()
        return (draft[:right] + junk)[: int(self.random.integers(0, most + 1))]


class Avoiding:
    """Branches that follow from the text, and from the chain's tokens, which they avoid."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def chain(self, text: list[int], most: int) -> None:
        """The levels' own."""

    def branches(self, text: list[int], most: int, chain: list[int], rows: int) -> list[list[int]]:
        """Some begin with the chain's first token; all leave it early."""
        size, last = self.vocabulary, text[-1]
        tail = [(3 * last + text[0] + 2 * d) % size for d in range(most)]
        firsts = [t for t in range(last, last + size) if t % size not in chain[:1]]
        found = [[first % size, *tail] for first in firsts]
        if len(chain) > 1:
            found.insert(1, [chain[0], (chain[1] + 1) % size, *tail])
        return [branch[:most] for branch in found[:rows]]


def common_prefix(one: list[int], other: list[int]) -> int:
    """Leading tokens that are equal."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)


class NoBranches:
    """Chains alone."""

    def chain(self, text: list[int], most: int) -> None:
        """The levels' own."""

    def branches(self, text: list[int], most: int, chain: list[int], rows: int) -> list[list[int]]:
        """None."""
        return []


def run(
    llm, source: Any, jobs: dict, fault: str | None = None
) -> tuple[dict, Counter, dict[tuple[int, ...], list[int]]]:
    """Results of `run_jobs` with branches of `source`; what was seen; text -> the chain drafted."""
    runner = runner_of(llm)
    proposer = runner.drafter
    cascade, hosted = proposer.cascade, proposer.branches
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    seen = Counter(rows=hosted.most, lookahead=scheduler.num_lookahead_tokens)
    drafted: dict[tuple[int, ...], list[int]] = {}
    originals = cascade.propose, hosted.finish

    def propose(batch, slots, requested, *args):
        drafts, store = originals[0](batch, slots, requested, *args), cascade.branches
        store.clear(slots)
        for slot, most in zip(slots.tolist(), requested.tolist(), strict=True):
            text = batch.tokens[batch.rows[slot], : proposer.requests.committed[slot]].tolist()
            if (chosen := source.chain(text, most)) is not None:
                drafts.counts[slot] = len(chosen)
                drafts.token_ids[slot, : len(chosen)] = chosen
                drafts.point_mass[slot] = True
            chain = drafts.token_ids[slot, : drafts.counts[slot]].tolist()
            drafted[tuple(text)] = chain
            for j, own in enumerate(source.branches(text, most, chain, hosted.most - 1)):
                seen["one row"] += bool(own) and not store.room[slot]
                own = own[: store.room[slot]]
                rows = [chain, *(store.token_ids[slot, i].tolist() for i in range(j))]
                rows = [
                    row[:n] for row, n in zip(rows, [len(chain), *store.counts[slot]], strict=False)
                ]
                shared = [common_prefix(own, row) for row in rows]
                known = max(shared)
                if known < len(own):
                    store.counts[slot, j] = len(own)
                    store.token_ids[slot, j, : len(own)] = own
                    store.shared[slot, j], store.parent[slot, j] = known, shared.index(known)
                    seen["shared"] += known
        return drafts

    def finish(winner, kept, of_chain):
        rows, size = hosted.rows, hosted.groups[0].block_size
        seen["groups"] = len(hosted.groups)
        store = cascade.branches.counts[proposer.request_slots(len(winner))]
        computed = np.maximum(rows.counts[:, 1:] - 1, 0)
        seen["cut"] += int((computed < store).any(1).sum())
        for i in np.flatnonzero(winner):
            seen["won"] += 1
            base = runner.input_batch.num_computed_tokens_cpu[i]
            seen[f"won at {base % size}"] += 1
        originals[1](winner, kept, of_chain)

    cascade.propose, hosted.finish = propose, finish
    # A model is to draft whatever it costs.
    cascade.lowest.choice.begins = lambda slots, *_: np.ones(len(slots), dtype=bool)
    cascade.lowest.choice.goes_on = lambda slots, *_: np.ones(len(slots), dtype=bool)
    undo = FAULTS[fault](runner) if fault else None
    try:
        return run_jobs(llm, jobs), seen, drafted
    finally:
        cascade.propose, hosted.finish = originals
        if undo is not None:
            undo()


def difference_of_caches(llm, source: Any, prompt: list[int], length: int) -> tuple[float, int]:
    """Compare what requests with branches leave in the caches with a prefill of the same text.

    Returns:
        (largest difference of the entries of all full blocks and layers; steps that a branch won).
    """
    runner = runner_of(llm)
    hosted, found = runner.drafter.branches, {}

    def flat_drafts(slots):
        tables = [table.block_table.np[0].copy() for table in runner.input_batch.block_table]
        length = runner.drafter.requests.committed[slots[0]]
        found["last"] = runner.input_batch.token_ids_cpu[0, :length].tolist(), tables
        return original(slots)

    original, kept, won = hosted.flat_drafts, [], 0
    hosted.flat_drafts = flat_drafts
    for each, most in ((source, length), (NoBranches(), 1)):
        llm.reset_prefix_cache()
        params = {"temperature": 0, "ignore_eos": True, "max_tokens": most}
        _, seen, _ = run(llm, each, {"a": {"prompts": [prompt], "params": params}})
        if not kept:
            prompt, _ = found["last"]
        full = len(prompt[:-1]) // hosted.groups[0].block_size
        kept.append(
            [
                cache[table[:full]].view(np.float32).copy()
                for table, caches in zip(found["last"][1], hosted.caches, strict=True)
                for cache in caches
            ]
        )
        won += seen["won"]
    hosted.flat_drafts = original
    pairs = zip(*kept, strict=True)
    return max(float(abs(one - other).max()) for one, other in pairs), won


def _replaced(owner: Any, name: str, new: Any) -> Callable[[], None]:
    """Put `new` in the place of an attribute; what puts the old one back."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    return lambda: setattr(owner, name, old)


def _no_copy(name: str, runner: Any) -> Callable[[], None]:
    nothing = np.zeros(0, dtype=np.int64)
    return _replaced(row_layout.PrivateBlocks, name, lambda *_: (nothing, nothing))


def _one_row_off(runner: Any) -> Callable[[], None]:
    sampler = runner.rejection_sampler
    original = sampler._follow

    def follow(whole, rows, emitted, accepted):
        places = rows.places.copy()
        places[:, 1:] -= 1
        return original(whole, rows._replace(places=places), emitted, accepted)

    return _replaced(sampler, "_follow", follow)


def _as_if_the_chain_had_won(runner: Any, **changed: Any) -> Callable[[], None]:
    hosted = runner.drafter.branches
    original = hosted.finish

    def finish(*args):
        original(*args)
        kept = hosted.followed.kept
        told = {"of_chain": kept, "places": None}
        hosted.followed = hosted.followed._replace(**{name: told[name] for name in changed})

    return _replaced(hosted, "finish", finish)


FAULTS: dict[str, Callable[[Any], Callable[[], None]]] = {
    "no copy of the text before a root": functools.partial(_no_copy, "copied_before"),
    "shared tokens written once": functools.partial(_no_copy, "repeated"),
    "no copy of what a branch computed": functools.partial(_no_copy, "copied_after"),
    "tokens drawn one row off": _one_row_off,
    "a level keeps its entries": functools.partial(_as_if_the_chain_had_won, of_chain=True),
    "states of the chain": functools.partial(_as_if_the_chain_had_won, places=True),
}
