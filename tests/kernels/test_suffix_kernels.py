"""Suffix lookup on the device against the same rule in plain numpy, number for number."""

import numpy as np
import pytest
import torch
from support.marks import slow
from support.proposal_states import MAX_NUM_REQS, poison
from support.suffix_requests import Requests, markov, store_of

from vllm_hsd.cascade import shared_outputs, suffix_lookup
from vllm_hsd.cascade.shared_outputs import SharedOutputs
from vllm_hsd.cascade.text_order import DEPTH, END_OF_TEXT, OCCURRENCES, PROBES


# In 38 a search ends after the last place of a store.
@pytest.mark.parametrize("seed", [1, 2, 38, *slow(*range(9, 38), 39)])
def test_random_texts_and_stores(seed, monkeypatch):
    """Texts over several chunks, unverified ends, a request that is not to draft."""
    monkeypatch.setattr(suffix_lookup, "search_chunk", lambda *_: 16)
    rng = np.random.default_rng(seed)
    vocabulary = int(rng.integers(2, 9))
    texts = [
        (markov(rng, int(rng.integers(2, most)), vocabulary), rng.integers(0, vocabulary, drafted))
        for drafted, most in ((0, 16), (0, 90), (1, 16), (3, 16))
    ]
    stored = [markov(rng, int(rng.integers(1, 80)), vocabulary) for _ in range(4)]
    store = store_of(*stored) if seed % 4 else None
    requests = Requests(texts, [8, 0 if seed % 2 else 5, 8, 3])
    assert any(requests.compare(store))
    shared = shared_of([markov(rng, int(rng.integers(1, 80)), vocabulary) for _ in range(3)], 130)
    assert any(Requests(texts, [8, 0 if seed % 2 else 5, 8, 3]).compare(store, shared=shared))


def shared_of(outputs, limit) -> SharedOutputs:
    """A ring to which outputs were added after prompts of two tokens."""
    shared, count = SharedOutputs(limit, torch.device("cpu")), len(outputs)
    lengths = torch.tensor([2 + len(output) for output in outputs], dtype=torch.int32)
    text = poison(torch.empty(count, int(lengths.max()), dtype=torch.int32))
    for row, output in zip(text, outputs, strict=True):
        row[2 : 2 + len(output)] = torch.from_numpy(np.asarray(output, np.int32))
    slots = torch.arange(count, dtype=torch.int32)
    shared.add(slots, torch.full_like(slots, 2), lengths, text)
    return shared


@pytest.mark.every_kernel
def test_a_ring_of_shared_outputs(monkeypatch):
    """The oldest are overwritten, an end follows each, an output longer than the ring is cut."""
    monkeypatch.setattr(shared_outputs, "COPY_CHUNK", 4)
    end = END_OF_TEXT
    assert shared_of([[7, 8, 9], [], [4]], 8).tokens.tolist() == [7, 8, 9, end, 4, end, end, end]
    wrapped = shared_of([[1, 2, 3, 4, 5], [6, 7, 8]], 8)
    assert wrapped.tokens.tolist() == [8, end, 3, 4, 5, end, 6, 7]
    assert int(wrapped.next) == 2
    assert shared_of([range(20)], 8).tokens.tolist() == [*range(13, 20), end]


def test_shared_outputs_do_not_run_into_each_other():
    """Neither across an end nor from the newest output into what is left of the oldest."""
    shared = shared_of([[1, 2, 3, 4, 5], [6, 7, 8]], 8)
    texts = [([9, 8], []), ([9, 4], []), ([9, 5], []), ([9, 6], [])]
    assert Requests(texts, [3] * 4).compare(None, 0.0, shared) == [0, 1, 0, 1]


def test_more_occurrences_than_are_counted():
    """The latest of the own text; of a store all, found between evenly spaced places."""
    rng = np.random.default_rng(0)
    # The token after 0 is 1 at first, and 2 in as many places later.
    text = np.append(np.resize([0, 1], 3 * OCCURRENCES), np.resize([0, 2], 2 * OCCURRENCES - 5))
    requests = Requests([(np.append(text, [3, 0]), [])], [2])
    assert requests.compare() == [2]
    assert int(requests.state.window[0, requests.state.end[0] - 2]) == 2
    short = Requests([([9, 0], [])], [2])
    stored = rng.choice(40, 40 * PROBES + 7), rng.choice([0, 1, 2, 7], 5 * PROBES)
    assert any(short.compare(store_of(*stored), 0.01))


def test_the_longest_drafts():
    """Match and continuation together end at the depth of the store."""
    story = np.arange(100) % 97
    assert Requests([(story[:2], [])], [63], 63).compare(store_of(story), 0.0) == [DEPTH - 1]
    # One of two occurrences goes on, up to the text's end.
    again = np.append(story[:60], story[:2])
    assert Requests([(again, [])], [63], 63).compare(None, 0.0) == [60]


@pytest.mark.parametrize("min_acceptance", [0.0, 0.3, 1.0])
def test_drafts_end_before_unlikely_tokens(min_acceptance):
    rng = np.random.default_rng(3)
    requests = Requests([(markov(rng, 9, 5), []), (np.resize(np.arange(7), 12), [])], [5, 5])
    counts = requests.compare(store_of(markov(rng, 90, 5)), min_acceptance)
    assert any(counts) == (min_acceptance < 1)


@pytest.mark.every_kernel
def test_what_has_no_continuation():
    """Texts shorter than any match, the end of the store, tokens outside the vocabulary."""
    one, many = store_of([5]), store_of([1, 2, 3], [99], [3, 4])
    texts = [([5], []), ([7, 5], []), ([2, 3], [4]), ([98, 99], []), ([8, 2**30], [])]
    assert Requests(texts, [4] * 5).compare(one) == [0] * 5
    assert Requests(texts, [4] * 5).compare(many) == [0] * 5
    # What follows the ends of other texts counts against a continuation, and is none.
    assert Requests([([8, 3], []), ([8, 1], [])], [4, 1]).compare(many) == [1, 1]
    assert Requests([([1, 2, 3], [1])], [1]).compare() == [1]


def test_padding_drafts_nothing():
    requests = Requests([([1, 2, 1], []), ([4, 5, 4], [])], [1, 0])
    requests.state.slot[1], requests.state.base[1] = -1, 0
    poison(requests.text[MAX_NUM_REQS - 2])
    assert requests.compare(store_of([4, 5])) == [1, 0]
