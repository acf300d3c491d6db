"""Rows of an n-gram model on the device against `cascade.ngram_model`."""

import numpy as np
import pytest
import torch
from support.interpreter import count_loads
from support.proposal_states import (
    MAX_MODEL_LEN,
    GuardedState,
    poison_memory,
    runner_tensors,
    schedule_of,
)

from vllm_hsd.cascade import cascade_steps, ngram_model, ngram_rows
from vllm_hsd.cascade.ngram_model import NgramModelLevel
from vllm_hsd.cascade.ngram_rows import NgramRows
from vllm_hsd.cascade.schedule import Draft
from vllm_hsd.cascade.text_store import TextStore, collect_texts

CPU = torch.device("cpu")


def store_of(seed: int, vocabulary: int, tokens: int) -> TextStore:
    """Texts of a few tokens that repeat, some a single token long."""
    rng = np.random.default_rng(seed)
    texts, left = [np.arange(2)], tokens
    while left > 0:
        text = rng.integers(0, 5, rng.integers(1, 40))
        text[rng.random(len(text)) < 0.1] = rng.integers(0, vocabulary)
        texts.append(text)
        left -= len(text)
    return collect_texts(texts, vocabulary)


@pytest.mark.parametrize(
    ("seed", "order", "vocabulary", "tokens", "occurrences"),
    [
        (0, 6, 70, 250, 256),
        # More occurrences of the last token than are looked at.
        (4, 4, 70, 200, 4),
        pytest.param(1, 3, 70, 40, 256, marks=pytest.mark.slow),
        pytest.param(2, 1, 70, 600, 256, marks=pytest.mark.slow),
        pytest.param(3, 6, 5000, 2000, 256, marks=pytest.mark.slow),
    ],
)
def test_rows_are_those_of_the_host_s_model(
    seed, order, vocabulary, tokens, occurrences, monkeypatch
):
    """After drafts and for verifications, over chunks of text and vocabulary."""
    for module in (ngram_model, ngram_rows):
        monkeypatch.setattr(module, "OWN_OCCURRENCES", occurrences)
    sizes = {"OWN_CHUNK": 16, "CHUNKS": 2, "OWNERS": 4, "LANES": 4, "WAYS": 8, "TOKEN_WAYS": 2}
    sizes["ROW_CHUNK"] = vocabulary // 2
    for name, size in sizes.items():
        monkeypatch.setattr(ngram_rows, name, 1 << size.bit_length() - 1)
    store = store_of(seed, vocabulary, tokens)
    host, level = NgramModelLevel(store, order), NgramRows.of(store, order, CPU)
    schedule = schedule_of(3, 8)
    state = GuardedState(schedule, 4).state
    tensors = runner_tensors(seed, 4, schedule.window) | {"scales": torch.ones(2)}
    text, g = tensors["text"], torch.Generator().manual_seed(seed)
    text[text == 4] = 50  # rare in the store
    cascade_steps.stage(state, schedule, **tensors)
    first = schedule.window
    state.window[:, first : first + 3] = torch.randint(0, 5, (4, 3), generator=g).int()
    state.end += torch.tensor([3, 2, 0, 1], dtype=torch.int32)
    state.slot[3] = -1
    level.text = text
    poison_memory(monkeypatch)
    for op, rows in ((schedule.ops[0], 1), (schedule.ops[3], 4)):
        found = level.forward(state, op, rows).view(4, rows, vocabulary)
        assert found.isfinite().all()
        for b in range(3):
            base, end = int(state.base[b]), int(state.end[b])
            whole = torch.cat((text[state.slot[b], :base], state.window[b, :end])).numpy()
            for i in range(rows):
                until = end if isinstance(op, Draft) else min(first + i, end)
                expected = host.distribution(whole[: base + until])
                torch.testing.assert_close(
                    found[b, i].exp(), torch.from_numpy(expected), rtol=2e-5, atol=1e-9
                )


@pytest.mark.every_kernel
def test_a_single_weight_of_the_own_text_is_seen(monkeypatch):
    """Negative control of the comparison above."""
    store = store_of(0, 70, 600)
    host, level = NgramModelLevel(store, 3), NgramRows.of(store, 3, CPU)
    level.own_weight -= 1
    schedule = schedule_of(3, 8)
    state = GuardedState(schedule, 2).state
    tensors = runner_tensors(0, 2, schedule.window) | {"scales": torch.ones(2)}
    cascade_steps.stage(state, schedule, **tensors)
    level.text = tensors["text"]
    found = level.forward(state, schedule.ops[0], 1)[0].exp()
    n = int(tensors["length"][state.slot[0]])
    assert n > MAX_MODEL_LEN // 2
    expected = torch.from_numpy(host.distribution(level.text[state.slot[0], :n].numpy()))
    assert (found / expected - 1).abs().max() > 1e-2


@pytest.mark.interpreted
def test_few_loads_of_a_draft_token_depend_on_each_other():
    """Those of the longest program of each kernel, after the commonest token of a long text.

    All its contexts are in the store, and so are thousands of tokens after the shortest.
    """
    tokens = np.minimum(np.random.default_rng(0).zipf(1.3, 300_000), 31_999)
    store = collect_texts(np.split(tokens, 60), 32_000)
    host, level = NgramModelLevel(store, 6), NgramRows.of(store, 6, CPU)
    length = 16_000 + int(np.flatnonzero(tokens[16_000:] == 1)[0]) + 1
    schedule = schedule_of(3, 8)
    state = GuardedState(schedule, 1).state
    level.text = torch.from_numpy(tokens[:40_960]).int()[None]
    state.window[0, :3] = level.text[0, length - 3 : length]
    state.base[0], state.end[0], state.slot[0] = length - 3, 3, 0
    with count_loads() as loads:
        found = level.forward(state, schedule.ops[0], 1)[0].exp()
    expected = torch.from_numpy(host.distribution(tokens[:length].astype(np.int32)))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-9)
    assert len(loads) == 3 and loads.total() <= 60


def test_runs_are_the_different_sequences_of_the_store():
    store = store_of(1, 70, 300)
    level = NgramRows.of(store, 4, CPU)
    tokens, order = level.texts
    for k in range(1, 5):
        starts = level.runs.starts[level.runs.offsets[k - 1] : level.runs.offsets[k]]
        assert starts[-1] == len(order)
        last = level.runs.last[level.runs.offsets[k - 1] : level.runs.offsets[k]]
        counted = {}
        runs = zip(*(x.tolist() for x in (starts[:-1], starts[1:], last[:-1])), strict=True)
        for run, after, next_token in runs:
            at = int(order[run])
            sequence = tuple(tokens[at : at + k + 1].tolist())
            if len(sequence) == k + 1 and -1 not in sequence:
                assert sequence not in counted and sequence[-1] == next_token
                counted[sequence] = after - run
        expected = {}
        for begin, end in zip(store.starts[:-1], store.starts[1:], strict=True):
            for at in range(begin, end - k):
                sequence = tuple(store.tokens[at : at + k + 1].tolist())
                expected[sequence] = expected.get(sequence, 0) + 1
        assert counted == expected
