"""What an entry of an EAGLE-3 head reads: the target's states of this step, kept ones, its own."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.emulated_device import CUDA, emulated

from vllm_hsd.runner_v1 import levels
from vllm_hsd.runner_v1.eagle3 import Eagle3Level

ROWS, WIDTH, HIDDEN, TOKENS, BLOCK = 3, 80, 4, 3, 16


class Head:
    """Without attention: an entry's output is a function of its token and of what it reads."""

    model = SimpleNamespace(use_aux_hidden_state=True)

    def combine_hidden_states(self, states):
        return states.reshape(len(states), 2, HIDDEN).sum(1)

    def __call__(self, input_ids, positions, hidden_states):
        outputs = 0.5 * hidden_states + input_ids[:, None].double() + 0.01 * positions[:, None]
        return outputs, outputs

    def compute_logits(self, hidden):
        return hidden


def state(row: int, position: int) -> torch.Tensor:
    """[2, hidden] the target's states of two layers."""
    return torch.arange(2 * HIDDEN).reshape(2, HIDDEN).double() + 100 * row + position


@pytest.fixture
def level(request, monkeypatch):
    device = getattr(request, "param", torch.device("cpu"))
    monkeypatch.setattr(levels, "set_forward_context", lambda *_, **__: contextlib.nullcontext())
    table = SimpleNamespace(
        block_size=BLOCK,
        block_table=SimpleNamespace(np=np.arange(ROWS * WIDTH // BLOCK).reshape(ROWS, -1)),
    )
    runner = SimpleNamespace(device=device, input_batch=SimpleNamespace(block_table=[table]))
    limits = SimpleNamespace(max_num_seqs=ROWS, max_num_batched_tokens=7)
    model = SimpleNamespace(get_vocab_size=lambda: HIDDEN)
    config = SimpleNamespace(scheduler_config=limits, model_config=model)
    bare = Eagle3Level(runner, config, 0, WIDTH)
    bare.model = Head()
    with emulated() if device == CUDA else contextlib.nullcontext():
        bare.own = torch.zeros(ROWS, TOKENS + 1, HIDDEN, dtype=torch.float64, device=device)
        bare.kept = torch.zeros(ROWS, 32, HIDDEN, dtype=torch.float64, device=device)
    spec = SimpleNamespace(block_size=BLOCK)
    bare.attention_groups = [SimpleNamespace(kv_cache_group_id=0, kv_cache_spec=spec)]
    bare.computed_with = np.full(ROWS * WIDTH, -1, dtype=np.int32)
    monkeypatch.setattr(bare, "_attention_metadata", lambda *_: ({}, {}))
    states_before = bare._states_before

    def checked(rows, entries, verified):
        found = states_before(rows, entries, verified)
        for row, entry, read in zip(
            rows[verified], entries[verified], found[verified], strict=True
        ):
            assert read.tolist() == state(row, entry).sum(0).tolist()
        return found

    monkeypatch.setattr(bare, "_states_before", checked)
    with emulated() if device == CUDA else contextlib.nullcontext():
        yield bare


def take(level, first, counts, verified) -> None:
    """A step of all rows: the target's states at positions first[i], ..., counts[i] of them."""
    states = [
        torch.stack([state(r, first[r] + j)[i] for r in range(ROWS) for j in range(counts[r])]).to(
            level.device
        )
        for i in range(2)
    ]
    level.take_states(states, np.arange(ROWS)[::-1], first, counts, verified)


def expected(tokens, row: int, end: int, verified: int) -> torch.Tensor:
    """[hidden] output of the entry that reads the last of `end` tokens."""
    output = torch.zeros(HIDDEN, dtype=torch.float64)
    for entry in range(end - 1):
        read = state(row, entry).sum(0) if entry < verified else output
        output = 0.5 * read + int(tokens[row, entry + 1]) + 0.01 * entry
    return output


@pytest.mark.parametrize(
    ("level", "seed"),
    [*((torch.device("cpu"), seed) for seed in range(20)), (CUDA, 0), (CUDA, 1)],
    indirect=["level"],
)
def test_every_draft_follows_the_states_of_the_verified_text(level, seed):
    """The head runs in some steps only, at most one token after the other beyond the text."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, 9, (ROWS, WIDTH)).astype(np.int32)
    rows, fed = np.arange(ROWS), np.zeros(ROWS, dtype=np.int64)
    first, counts = np.zeros(ROWS, dtype=np.int64), rng.integers(1, 12, ROWS)
    verified = counts.copy()
    for _ in range(8):
        take(level, first, counts, verified)
        text = verified + 1
        drafting = rng.random(ROWS) < 0.6
        for ahead in range(TOKENS):
            now = np.flatnonzero(drafting)
            end = text[now] + ahead
            logits = level.forward(tokens, now, fed[now], end - fed[now], np.ones(len(now), int))
            for i, row in enumerate(now):
                assert logits[i].tolist() == pytest.approx(
                    expected(tokens, row, end[i], verified[row]).tolist()
                )
            fed[now] = end
            tokens[now, end] = rng.integers(2, 9, len(now))
        fed = np.minimum(fed, text)
        lagging = np.flatnonzero(fed < text)
        entries = np.maximum(fed[lagging] - 1, 0)
        must = level.must_catch_up(lagging, entries)
        now = lagging[must]
        level.forward(tokens, now, fed[now], text[now] - fed[now], np.zeros(len(now), int))
        fed[now] = text[now]
        level.keep(lagging[~must], entries[~must])
        for row in rows:
            slots = row * WIDTH + np.arange(verified[row])
            done = np.where(
                np.arange(1, verified[row] + 1) < fed[row], tokens[row, 1 : text[row]], -1
            )
            assert level.computed_with[slots].tolist() == done.tolist()
        first = verified.copy()
        counts = rng.integers(1, TOKENS + 2, ROWS)
        verified = first + rng.integers(1, counts + 1)


def test_one_pass_gives_the_logits_of_rows_that_are_done_at_different_times(level):
    tokens = np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH).astype(np.int32)
    verified = np.array([5, 3, 4])
    take(level, np.zeros(ROWS, dtype=np.int64), verified, verified)
    end = verified + np.array([3, 1, 2])
    logits = level.forward(tokens, np.arange(ROWS), np.zeros(ROWS, int), end, np.ones(ROWS, int))
    for row in range(ROWS):
        wanted = expected(tokens, row, end[row], verified[row])
        assert logits[row].tolist() == pytest.approx(wanted.tolist())


def test_a_shared_prefix_counts_where_the_head_has_read_the_same_tokens(level):
    tokens = np.tile(np.arange(WIDTH, dtype=np.int32), (ROWS, 1))
    first, counts = np.zeros(ROWS, dtype=np.int64), np.full(ROWS, BLOCK)
    take(level, first, counts, counts)
    level.mark_computed(tokens, np.array([0]))
    # The others continue the block of row 0: row 1 alike, row 2 has read another fourth token.
    table = level.runner.input_batch.block_table[0].block_table.np
    table[1:, 0] = table[0, 0]
    tokens[2, 3] = 1
    level.first[:] = [0, BLOCK, BLOCK]
    assert [level.prefix_is_valid(tokens, row) for row in range(ROWS)] == [True, True, False]
    # Another token after the block changes its last entry only.
    tokens[1, BLOCK] = 1
    assert level.prefix_is_valid(tokens, 1)
    level.unmark(0)
    assert not level.prefix_is_valid(tokens, 1)
