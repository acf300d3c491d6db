"""Rows of a bigram model on the device against `cascade.bigram`."""

import numpy as np
import pytest
import torch
from support.proposal_states import GuardedState, poison_memory, runner_tensors, schedule_of

from vllm_hsd.cascade import bigram_rows, cascade_steps
from vllm_hsd.cascade.bigram import count_pairs
from vllm_hsd.cascade.bigram_rows import BigramRows
from vllm_hsd.cascade.schedule import Draft
from vllm_hsd.cascade.text_store import collect_texts

pytestmark = pytest.mark.every_kernel
CPU = torch.device("cpu")
VOCABULARY = 70


def rows_and_expected(
    seed: int, dtype: torch.dtype = torch.float32, lost: int = 0, last: tuple[int, int] = (2, 2)
):
    """Probabilities [rows, V] after drafts and for verifications, on the device and by hand.

    The device does not know of `lost` times that each pair was seen. `last` is a drafted token, on
    the device and by hand.
    """
    rng = np.random.default_rng(seed)
    texts = [rng.zipf(1.5, 300) % 65, np.arange(60), np.array([7])]
    store = collect_texts(texts, VOCABULARY)
    pairs, level = count_pairs(store), BigramRows.of(store, dtype, CPU)
    level.pairs[2].sub_(lost)
    schedule = schedule_of(3, 8)
    state = GuardedState(schedule, 4).state
    tensors = runner_tensors(seed, 4, schedule.window) | {"scales": torch.ones(2)}
    cascade_steps.stage(state, schedule, **tensors)
    first = schedule.window
    draft = torch.from_numpy(rng.integers(0, VOCABULARY, (4, 3)))
    # After 69 nothing was seen, after 1 and 2 much.
    draft[0] = torch.tensor([69, 1, last[0]])
    state.window[:, first : first + 3] = draft.int()
    state.end += torch.tensor([3, 2, 0, 1], dtype=torch.int32)
    state.slot[3] = -1
    found, expected = [], []
    for op, rows in ((schedule.ops[0], 1), (schedule.ops[3], 4)):
        logits = level.forward(state, op, rows)
        assert logits.dtype == dtype and logits.isfinite().all()
        found.append(logits.view(4, rows, VOCABULARY)[:3].flatten(0, 1).float().exp())
        for b in range(3):
            end = int(state.end[b])
            for i in range(rows):
                until = end if isinstance(op, Draft) else min(first + i, end)
                token = int(state.window[b, until - 1])
                expected.append(pairs.distribution(last[1] if token == last[0] else token))
    return torch.cat(found), torch.from_numpy(np.stack(expected)).float()


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_those_of_the_host_s_model(seed, monkeypatch):
    """Over chunks of the vocabulary, and of the pairs of a token."""
    monkeypatch.setattr(bigram_rows, "CHUNK", 32)
    monkeypatch.setattr(bigram_rows, "LANES", 4)
    poison_memory(monkeypatch)
    found, expected = rows_and_expected(seed)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-9)


def test_rows_are_of_the_models_type():
    """So that what another level passes on keeps its precision."""
    found, expected = rows_and_expected(0, torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("placeholder", [VOCABULARY, VOCABULARY + 400, 1 << 30])
def test_a_placeholder_from_outside_the_vocabulary_is_token_0(placeholder):
    """As a lookup drafts it from the prompt of a model that reads pictures."""
    torch.testing.assert_close(*rows_and_expected(0, last=(placeholder, 0)), rtol=2e-5, atol=1e-9)


def test_a_lost_pair_is_seen():
    """Negative control of the comparison above."""
    found, expected = rows_and_expected(0, lost=1)
    assert (found / expected - 1).abs().max() > 1e-2
