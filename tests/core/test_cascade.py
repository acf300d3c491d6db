"""The recursion apart from its distribution: draft lengths, rounds, eos, caches, contexts, NaN.

tests/oracle enumerates the distributions of ownerle cascades.
"""

import logging

import numpy as np
import pytest
import torch
from oracle.exact import Table
from oracle.stand_ins import TableLevel

from vllm_hsd.core.cascade import Cascade
from vllm_hsd.core.counters import Count
from vllm_hsd.core.drafts import DraftStore, ragged_arange
from vllm_hsd.core.levels import DraftBatch, LevelOptions
from vllm_hsd.core.stopping import EntropyThresholds
from vllm_hsd.verify.rng import host_uniforms

PROMPT, VOCABULARY, WIDTH = 3, 4, 40


class CountingLevel(TableLevel):
    """Also notes how many tokens each forward pass is fed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.passes: list[list[int]] = []

    def forward(self, tokens, rows, starts, counts, num_logits):
        self.passes.append(counts.tolist())
        logits = super().forward(tokens, rows, starts, counts, np.maximum(num_logits, 1))
        return logits if num_logits.any() else None


def levels(count: int, kind=CountingLevel):
    return [kind(Table(VOCABULARY, 100 + k), PROMPT) for k in range(count)]


def batch_of(size: int, num_levels: int, *, greedy=False, eos=-1, seed=0) -> DraftBatch:
    draws = np.zeros(size, dtype=np.int64)

    def drawn_uniforms(requests, counts, level):
        owners, offsets = ragged_arange(counts)
        owner = requests[owners]
        drawn = host_uniforms(1000 * seed + owner, np.int64(level), draws[owner] + offsets)
        draws[requests] += counts
        return drawn

    tokens = np.full((size, WIDTH), -9, dtype=np.int32)
    tokens[:, :PROMPT] = np.arange(size)[:, None] % VOCABULARY
    return DraftBatch(
        tokens=tokens,
        rows=np.arange(size),
        end=np.full(size, PROMPT),
        cached=np.zeros((num_levels, size), dtype=np.int64),
        eos=np.full(size, eos),
        greedy=greedy,
        probs=lambda logits, requests, level: logits.softmax(-1),
        uniforms=drawn_uniforms,
        thresholds=EntropyThresholds.fresh(num_levels, size),
    )


def options(*draft_lengths, **last) -> list[LevelOptions]:
    return [
        LevelOptions(length, **(last if k == len(draft_lengths) - 1 else {}))
        for k, length in enumerate(draft_lengths)
    ]


REQUESTED = np.array([0, 1, 2, 3, 5, 8, 0, 8])


def propose(cascade: Cascade, batch: DraftBatch, requested: np.ndarray) -> DraftStore:
    return cascade.propose(batch, np.arange(len(requested)), requested)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("draft_lengths", [(8,), (1, 8), (3, 8), (2, 3, 8), (9, 8)])
def test_every_request_gets_the_draft_length_it_requested(draft_lengths, greedy):
    """Without eos a level fills its draft exactly, and nothing is written after it."""
    size = len(REQUESTED)
    cascade = Cascade(levels(len(draft_lengths)), options(*draft_lengths), size)
    batch = batch_of(size, len(draft_lengths), greedy=greedy)
    drafts = propose(cascade, batch, REQUESTED)
    assert drafts.counts.tolist() == REQUESTED.tolist()
    assert (batch.end == PROMPT + REQUESTED).all()
    for row, length in enumerate(REQUESTED):
        kept = batch.tokens[row, PROMPT : PROMPT + length]
        assert kept.tolist() == drafts.token_ids[row, :length].tolist()
        # A level below may have drafted over the end, never beyond what was requested.
        assert (batch.tokens[row, PROMPT + length :] == -9).all()
    assert (batch.cached <= batch.end).all()


def test_rounds_are_limited():
    cascade = Cascade(levels(2), options(2, 8, max_rounds=1), 200)
    drafts = propose(cascade, batch_of(200, 2), np.full(200, 8))
    assert set(drafts.counts.tolist()) == {1, 2, 3}
    assert cascade.counters.rows[0, Count.rounds] == 200
    cascade = Cascade(levels(2), options(2, 8, max_rounds=2), 200)
    drafts = propose(cascade, batch_of(200, 2), np.full(200, 8))
    assert drafts.counts.min() >= 2 and drafts.counts.max() <= 6


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("horizontal_tokens", [0, 2])
@pytest.mark.parametrize("draft_lengths", [(8,), (3, 8), (2, 3, 8)])
def test_a_draft_ends_with_eos(draft_lengths, horizontal_tokens, greedy):
    size = 300
    if len(draft_lengths) == 1:
        horizontal_tokens = 0
    cascade = Cascade(levels(len(draft_lengths)), options(*draft_lengths), size, horizontal_tokens)
    batch = batch_of(size, len(draft_lengths), greedy=greedy, eos=1)
    drafts = propose(cascade, batch, np.full(size, 8))
    ended = 0
    for ids, count in zip(drafts.token_ids, drafts.counts, strict=True):
        assert count >= 1
        assert 1 not in ids[: count - 1]
        assert count == 8 or ids[count - 1] == 1
        ended += ids[count - 1] == 1
    assert ended > 0


def test_caches_over_calls_with_rejections_and_idle_requests():
    """TableLevel fails when it is told that its cache holds a token that it was not fed."""
    rng = np.random.default_rng(0)
    stand_ins = levels(3)
    size = 20
    cascade = Cascade(stand_ins, options(2, 3, 6), size, horizontal_tokens=1)
    batch = batch_of(size, 3)
    tokens, length, cached = batch.tokens, batch.end.copy(), batch.cached
    for call in range(6):
        batch = batch_of(size, 3, seed=call)
        batch.tokens, batch.end, batch.cached = tokens, length.copy(), cached.copy()
        requested = rng.integers(0, 6, size) * (rng.random(size) < 0.7)
        idle = np.flatnonzero(requested == 0)
        cascade.models.ingest(batch, idle, length[idle] - 1)
        drafts = propose(cascade, batch, requested)
        assert (batch.cached[:, idle] >= length[idle] - 1).all()
        # The target keeps a part of the draft and adds a token of its own.
        accepted = rng.integers(0, drafts.counts + 1)
        tokens[np.arange(size), length + accepted] = rng.integers(0, VOCABULARY, size)
        length += accepted + 1
        cached = np.minimum(batch.cached, length - 1)
    # Every call feeds a level few new tokens: what is valid is not computed again.
    assert max(max(counts) for level in stand_ins for counts in level.passes[5:]) <= 12


class ShortLevel(CountingLevel):
    """Fails when it is fed a position beyond its context."""

    def __init__(self, seed: int, context_length: int):
        super().__init__(Table(VOCABULARY, seed), PROMPT)
        self.context_length = context_length

    def forward(self, tokens, rows, starts, counts, num_logits):
        assert (starts + counts).max(initial=0) <= self.context_length
        return super().forward(tokens, rows, starts, counts, num_logits)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(
    ("contexts", "drafted"),
    # A draft may end one token after the longest text that the highest level taking part reads.
    [
        ((7, 40), 12),
        ((40, 7), 5),
        ((7, 7), 5),
        ((5, 7), 5),
        ((7, 5), 3),
        ((2, 40), 12),
        ((2, 2), 0),
    ],
)
def test_levels_sit_out_beyond_their_context(contexts, drafted, greedy):
    stand_ins = [ShortLevel(100 + k, length) for k, length in enumerate(contexts)]
    cascade = Cascade(stand_ins, options(12, 12), 60)
    batch = batch_of(60, 2, greedy=greedy)
    everything = np.arange(60)
    drafts = propose(cascade, batch, np.full(60, 12))
    assert (drafts.counts <= drafted).all()
    assert drafts.counts.max() == drafted
    assert (batch.end == PROMPT + drafts.counts).all()
    if contexts[1] == 2:
        assert (drafts.level[everything, 0] == 0).all() or not drafted
    later = batch_of(60, 2, greedy=greedy)
    later.tokens[:, :30] = 1
    cascade.models.ingest(later, everything, np.full(60, 30))
    assert (later.cached <= np.array(contexts)[:, None]).all()


def test_the_level_below_drafts_where_a_level_sits_out():
    """Its tokens keep its own probabilities, and count as its own."""
    stand_ins = [ShortLevel(100, 40), ShortLevel(101, PROMPT - 1)]
    cascade = Cascade(stand_ins, options(3, 8), 20)
    drafts = propose(cascade, batch_of(20, 2), np.full(20, 8))
    assert drafts.counts.tolist() == [3] * 20 and not stand_ins[1].passes
    for slot in range(20):
        for t, row in enumerate(drafts.rows(np.array([slot]), 3)[0]):
            expected = stand_ins[0].table(tuple(drafts.token_ids[slot, :t].tolist()))
            assert drafts.probs[row].tolist() == pytest.approx([float(v) for v in expected])
    assert cascade.counters.rows[:, Count.drafted].tolist() == [60, 0]
    cascade.record_acceptance(np.arange(20), np.full(20, 2), batch_of(20, 2).thresholds)
    assert cascade.counters.rows[:, Count.accepted].tolist() == [40, 0]


@pytest.mark.parametrize("greedy", [False, True])
def test_a_level_sits_out_for_the_requests_that_are_marked(greedy):
    """The one below drafts in its place; the lowest one drafts nothing, and neither is fed."""
    stand_ins = levels(2)
    cascade = Cascade(stand_ins, options(3, 8), 20)
    batch = batch_of(20, 2, greedy=greedy)
    lowest, top = np.arange(20) % 3 == 1, np.arange(20) % 3 == 2
    batch.sits_out = np.array([lowest, top])
    drafts = propose(cascade, batch, np.full(20, 8))
    assert drafts.counts.tolist() == np.where(top, 3, 8).tolist()
    assert (drafts.level[lowest] == 1).all() and (drafts.level[top, :3] == 0).all()
    cascade.models.ingest(batch, np.arange(20), np.full(20, PROMPT + 3))
    assert (batch.cached[0, lowest] == 0).all() and (batch.cached[1, top] == 0).all()
    alone = batch_of(20, 1, greedy=greedy)
    alone.sits_out = np.array([lowest])
    counts = propose(Cascade(levels(1), options(8), 20), alone, np.full(20, 8)).counts
    assert counts.tolist() == np.where(lowest, 0, 8).tolist()


class BrokenLevel(TableLevel):
    """Gives rows of nan, and of one infinity, after some texts."""

    def row(self, behind_prompt):
        if sum(behind_prompt) % 3 == 1:
            return [float("nan")] * VOCABULARY
        if sum(behind_prompt) % 3 == 2:
            return [float("inf"), *[0.0] * (VOCABULARY - 1)]
        return super().row(behind_prompt)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("broken", [0, 1])
def test_logits_that_are_not_finite_are_reported_once_and_drafting_goes_on(broken, greedy, caplog):
    stand_ins = levels(2)
    stand_ins[broken] = BrokenLevel(Table(VOCABULARY, 100 + broken), PROMPT)
    cascade = Cascade(stand_ins, options(2, 6), 40)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            drafts = propose(cascade, batch_of(40, 2, greedy=greedy), np.full(40, 6))
    assert drafts.counts.tolist() == [6] * 40
    if not greedy:
        assert torch.allclose(drafts.probs.sum(-1), torch.ones(240, dtype=torch.float64))
    assert len(caplog.records) == 1 and f"levels[{broken}]" in caplog.text
