"""What the recursion keeps to, apart from the law: draft_lengths, rounds, eos, caches, bad rows.

The laws of whole cascades stand in tests/oracle.
"""

import logging

import numpy as np
import pytest
import torch
from oracle.exact import Table
from oracle.stand_ins import TableLevel, TableLookup

from vllm_hsd.core.cascade import Cascade, DraftBatch, LevelOptions
from vllm_hsd.core.drafts import ragged_arange
from vllm_hsd.core.stopping import EntropyThresholds
from vllm_hsd.verify import uniforms

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

    def coins(requests, counts, level):
        owners, offsets = ragged_arange(counts)
        who = requests[owners]
        drawn = uniforms(
            torch.from_numpy(1000 * seed + who),
            torch.tensor(level),
            torch.from_numpy(draws[who] + offsets),
        )
        draws[requests] += counts
        return drawn

    tokens = np.full((size, WIDTH), -9, dtype=np.int32)
    tokens[:, :PROMPT] = np.arange(size)[:, None] % VOCABULARY
    return DraftBatch(
        tokens=tokens,
        rows=np.arange(size),
        length=np.full(size, PROMPT),
        kv=np.zeros((num_levels, size), dtype=np.int64),
        eos=np.full(size, eos),
        greedy=greedy,
        probs=lambda logits, requests, level: logits.softmax(-1),
        uniforms=coins,
        thresholds=EntropyThresholds.fresh(num_levels, size),
    )


def plans(*draft_lengths, **last) -> list[LevelOptions]:
    return [
        LevelOptions(budget, **(last if k == len(draft_lengths) - 1 else {}))
        for k, budget in enumerate(draft_lengths)
    ]


WANT = np.array([0, 1, 2, 3, 5, 8, 0, 8])


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("draft_lengths", [(8,), (1, 8), (3, 8), (2, 3, 8), (9, 8)])
def test_every_request_gets_what_it_asks_for(draft_lengths, greedy):
    """Without eos a level fills its buffer exactly, and nothing is written behind it."""
    cascade = Cascade(levels(len(draft_lengths)), plans(*draft_lengths))
    batch = batch_of(len(WANT), len(draft_lengths), greedy=greedy)
    draft = cascade.propose(batch, WANT)
    assert draft.counts.tolist() == WANT.tolist()
    assert (batch.end == batch.length + WANT).all()
    for row, want in enumerate(WANT):
        kept = batch.tokens[row, PROMPT : PROMPT + want]
        assert kept.tolist() == draft.token_ids[row, :want].tolist()
        # A level below may have drafted over the end, never beyond what was asked for.
        assert (batch.tokens[row, PROMPT + want :] == -9).all()
    assert (batch.kv <= batch.end).all()


@pytest.mark.parametrize("draft_lengths", [(8,), (3, 8), (2, 3, 8)])
def test_nobody_asks(draft_lengths):
    cascade = Cascade(levels(len(draft_lengths)), plans(*draft_lengths))
    draft = cascade.propose(batch_of(4, len(draft_lengths)), np.zeros(4, dtype=np.int64))
    assert draft.counts.tolist() == [0] * 4
    assert len(draft.flat_token_ids()) == 0
    assert all(level.forwards == 0 for level in cascade.stats)
    empty = cascade.propose(batch_of(0, len(draft_lengths)), np.zeros(0, dtype=np.int64))
    assert len(empty.counts) == 0


def test_budgets_bound_every_round():
    below, above = levels(2)
    cascade = Cascade([below, above], plans(2, 7))
    cascade.propose(batch_of(50, 2), np.full(50, 7))
    stats = cascade.stats[0]
    assert stats.drafted <= 2 * stats.rounds
    # The first pass brings the prompt in; later ones verify at most two drafts, and feed what
    # the level drew itself the round before.
    assert max(max(counts) for counts in above.passes[1:]) <= 3
    assert max(max(counts) for counts in above.passes) <= PROMPT + 2


def test_rounds():
    cascade = Cascade(levels(2), plans(2, 8, max_rounds=1))
    draft = cascade.propose(batch_of(200, 2), np.full(200, 8))
    assert set(draft.counts.tolist()) == {1, 2, 3}
    assert cascade.stats[0].rounds == 200
    cascade = Cascade(levels(2), plans(2, 8, max_rounds=2))
    draft = cascade.propose(batch_of(200, 2), np.full(200, 8))
    assert draft.counts.min() >= 2 and draft.counts.max() <= 6


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("tail", [0, 2])
@pytest.mark.parametrize("draft_lengths", [(8,), (3, 8), (2, 3, 8)])
def test_a_draft_ends_with_eos(draft_lengths, tail, greedy):
    cascade = Cascade(levels(len(draft_lengths)), plans(*draft_lengths), tail)
    batch = batch_of(300, len(draft_lengths), greedy=greedy, eos=1)
    draft = cascade.propose(batch, np.full(300, 8))
    ended = 0
    for ids, count in zip(draft.token_ids, draft.counts, strict=True):
        assert count >= 1
        assert 1 not in ids[: count - 1]
        assert count == 8 or ids[count - 1] == 1
        ended += ids[count - 1] == 1
    assert ended > 0


def test_greedy_follows_the_top_level():
    """At temperature 0 every level hands up its own argmax, whatever is below."""
    top = Table(VOCABULARY, 102)
    for count in (1, 2, 3):
        stand_ins = [*levels(2)[: count - 1], CountingLevel(top, PROMPT)]
        cascade = Cascade(stand_ins, plans(*[2, 3, 8][-count:]))
        draft = cascade.propose(batch_of(4, count, greedy=True), np.full(4, 8))
        assert draft.laws is None
        for ids in draft.token_ids:
            for t in range(8):
                row = top(tuple(ids[:t].tolist()))
                assert ids[t] == max(range(VOCABULARY), key=lambda v: (row[v], -v))


def test_caches_over_calls_with_rejections_and_idle_requests():
    """TableLevel fails when it is told that its cache holds a token that it was not fed."""
    rng = np.random.default_rng(0)
    stand_ins = levels(3)
    cascade = Cascade(stand_ins, plans(2, 3, 6), horizontal_tokens=1)
    size = 20
    batch = batch_of(size, 3)
    tokens, length, kv = batch.tokens, batch.length.copy(), batch.kv.copy()
    for call in range(6):
        batch = batch_of(size, 3, seed=call)
        batch.tokens, batch.length, batch.kv = tokens, length.copy(), kv
        batch.end = length.copy()
        want = rng.integers(0, 6, size) * (rng.random(size) < 0.7)
        idle = np.flatnonzero(want == 0)
        cascade.ingest(batch, idle, length[idle] - 1)
        draft = cascade.propose(batch, want)
        assert (batch.kv[:, idle] >= length[idle] - 1).all()
        # The target keeps a part of the draft and adds a token of its own.
        accepted = rng.integers(0, draft.counts + 1)
        tokens[np.arange(size), length + accepted] = rng.integers(0, VOCABULARY, size)
        length += accepted + 1
        kv = np.minimum(batch.kv, length - 1)
    # Every call feeds a level few new tokens: what is valid is not computed again.
    assert max(max(counts) for level in stand_ins for counts in level.passes[5:]) <= 12


def test_ingest_feeds_each_level_up_to_the_end():
    stand_ins = levels(2)
    cascade = Cascade(stand_ins, plans(2, 4))
    batch = batch_of(3, 2)
    batch.tokens[:, :10] = 2
    batch.kv[:] = [[0, 4, 10], [2, 10, 10]]
    for level, valid in zip(stand_ins, batch.kv, strict=True):
        level.fed = {row: [2] * int(n) for row, n in enumerate(valid)}
    cascade.ingest(batch, np.arange(3), np.array([10, 10, 10]))
    assert batch.kv.tolist() == [[10] * 3] * 2
    assert [level.passes for level in stand_ins] == [[[10, 6]], [[8]]]


def test_a_level_that_finds_nothing_offers_nothing():
    cascade = Cascade([TableLookup(Table(VOCABULARY, 1), PROMPT), *levels(1)], plans(3, 6))
    draft = cascade.propose(batch_of(30, 2), np.full(30, 6))
    assert draft.counts.tolist() == [6] * 30
    assert 0 < cascade.stats[0].drafted < 3 * 30 * 6


class BrokenLevel(TableLevel):
    """Gives rows of nan, and of one infinity, after some texts."""

    def row(self, behind_prompt):
        if sum(behind_prompt) % 3 == 1:
            return [float("nan")] * VOCABULARY
        if sum(behind_prompt) % 3 == 2:
            return [float("inf"), *[0.0] * (VOCABULARY - 1)]
        return super().row(behind_prompt)


@pytest.mark.parametrize("broken", [0, 1])
def test_rows_that_are_not_finite_become_uniform_and_are_reported_once(broken, caplog):
    stand_ins = levels(2)
    stand_ins[broken] = BrokenLevel(Table(VOCABULARY, 100 + broken), PROMPT)
    cascade = Cascade(stand_ins, plans(2, 6))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            draft = cascade.propose(batch_of(40, 2), np.full(40, 6))
    assert draft.counts.tolist() == [6] * 40
    assert torch.allclose(draft.flat_laws().sum(-1), torch.ones(240, dtype=torch.float64))
    assert len(caplog.records) == 1 and f"levels[{broken}]" in caplog.text


def test_laws_belong_to_their_tokens():
    """The row of every token is the emitting level's law after the tokens before it."""
    stand_ins = levels(2)
    cascade = Cascade(stand_ins, plans(2, 5), horizontal_tokens=2)
    draft = cascade.propose(batch_of(30, 2), np.full(30, 7))
    rows = iter(draft.flat_laws())
    for ids, count, own in zip(draft.token_ids, draft.counts, draft.verified, strict=True):
        for t in range(count):
            level = stand_ins[1 if t < own else 0]
            law = [float(v) for v in level.table(tuple(ids[:t].tolist()))]
            assert next(rows).tolist() == pytest.approx(law)
            assert law[ids[t]] > 0


def test_counts_start_again_at_zero():
    cascade = Cascade(levels(2), plans(2, 4))
    cascade.propose(batch_of(5, 2), np.full(5, 4))
    taken = cascade.take_stats()
    assert [level.drafted > 0 for level in taken] == [True, True]
    assert taken[0].accepted <= taken[0].drafted
    assert taken[1].drafted == 20 and taken[1].rounds == 5
    assert all(level.drafted == level.forwards == 0 for level in cascade.take_stats())
