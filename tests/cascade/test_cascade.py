"""The recursion apart from its distribution: draft lengths, rounds, eos, caches, contexts, NaN.

tests/oracle enumerates the distributions of whole cascades.
"""

import numpy as np
import pytest
from oracle.exact import Table
from oracle.stand_ins import TableLevel, draft_batch

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.tools.reference.batch import DraftBatch
from vllm_hsd.tools.reference.cascade import Cascade
from vllm_hsd.tools.reference.drafts import DraftStore

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


def batch_of(size: int, num_levels: int, **kind) -> DraftBatch:
    tokens = np.full((size, WIDTH), -9, dtype=np.int32)
    tokens[:, :PROMPT] = np.arange(size)[:, None] % VOCABULARY
    return draft_batch(tokens, PROMPT, num_levels, **kind)


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
        drafts = propose(cascade, batch, requested)
        # The target keeps a part of the draft and adds a token of its own.
        accepted = rng.integers(0, drafts.counts + 1)
        tokens[np.arange(size), length + accepted] = rng.integers(0, VOCABULARY, size)
        length += accepted + 1
        cached = np.minimum(batch.cached, length - 1)
    # Every call feeds a level few new tokens: what is valid is not computed again.
    assert max(max(counts) for level in stand_ins for counts in level.passes[5:]) <= 12
