"""Predicted texts on the device against the same rule in plain numpy, number for number."""

from dataclasses import dataclass

import numpy as np
import pytest
from support.marks import slow
from support.proposal_states import MAX_NUM_REQS, poison
from support.suffix_requests import Requests, markov

from vllm_hsd.cascade import prediction_lookup
from vllm_hsd.cascade.prediction_lookup import DOUBT, LONGEST, PredictionLookup

WIDTH = 70


@dataclass
class Prediction:
    """A predicted text as a source, in plain numpy: the rule of `cascade.prediction_lookup`."""

    tokens: np.ndarray
    begin: int  # tokens of the prompt
    place: int = 0  # the last one
    at: int = 0  # tokens of the text when it was found

    def __post_init__(self) -> None:
        self.at = self.begin

    def find(self, text: np.ndarray) -> tuple[int, int]:
        """(tokens of the longest match, 0 for none; the place in the prediction after it)."""
        answer = text[self.begin :][::-1][:LONGEST]
        best, found = (0, 0), 0
        for place in range(1, len(self.tokens) + 1):
            before = self.tokens[:place][::-1][:LONGEST]
            size = min(len(answer), len(before))
            same = answer[:size] == before[:size]
            matched = size if same.all() else int(same.argmin())
            if matched and (matched, -self._rank(place, len(text))) > best:
                best, found = (matched, -self._rank(place, len(text))), place
        return best[0], found

    def draft(self, text: np.ndarray, committed: int, most: int) -> tuple[list[int], float]:
        """What follows in the prediction, and how sure each token is of it.

        Remembers where a committed text stands: what is drafted above it may be refused.
        """
        matched, place = self.find(text)
        if matched and len(text) == committed:
            self.place, self.at = place, len(text)
        draft = self.tokens[place : place + most] if matched else self.tokens[:0]
        return draft.tolist(), matched / (matched + DOUBT)

    def _rank(self, place: int, length: int) -> int:
        if place == self.place + length - self.at:
            return 0
        if place >= self.place:
            return 1 + place - self.place
        return 2 + len(self.tokens) + self.place - place


class Compared:
    """The same (tokens of the prompt, predicted tokens) of requests on the device and the host."""

    def __init__(self, predictions, width=WIDTH) -> None:
        self.lookup = PredictionLookup(MAX_NUM_REQS, width, "cpu")
        poison(self.lookup.tokens)
        self.plain: list[Prediction] = []
        for i, (begin, tokens) in enumerate(predictions):
            self.lookup.add_request(MAX_NUM_REQS - 1 - i, begin, tokens)
            self.plain.append(Prediction(np.array(tokens[:width], np.int32), begin))

    def drafts(self, texts, requested) -> list[list[int]]:
        """Drafts after (committed, drafted) texts, equal on both."""
        requests = Requests(texts, requested)
        state, ends = requests.state, requests.state.end.tolist()
        offers, drafts, width = self.lookup(state, requests.text), [], max(requested)
        for i, (known, most) in enumerate(zip(self.plain, requested, strict=True)):
            draft, sure = [], 0.0
            if most:
                text = requests.tokens[i, : requests.ends[i]]
                draft, sure = known.draft(text, requests.committed[i], most)
            drafts.append(draft)
            count, nothing = len(draft), [0] * (width - len(draft))
            confidence = [*np.cumprod(np.full(count, sure)), *nothing]
            assert state.drafted[0, i] == offers.counts[0, i] == count
            assert offers.token_ids[0, i, :width].tolist() == [*draft, *nothing]
            assert offers.confidence[0, i, :width].tolist() == confidence
            assert state.end[i] == ends[i] + count
            assert state.window[i, ends[i] : ends[i] + count].tolist() == draft
            facts = [len(known.tokens), known.begin, known.place, known.at]
            assert self.lookup.facts[MAX_NUM_REQS - 1 - i].tolist() == facts
        requests.guarded.assert_guards()
        return drafts


def one(prediction, begin=2):
    """Drafts of one request whose text grows."""
    compared = Compared([(begin, prediction)])
    return lambda text, drafted=(), most=3: compared.drafts([(text, drafted)], [most])[0]


@pytest.mark.parametrize("seed", [1, 2, *slow(*range(10, 40))])
def test_growing_texts(seed, monkeypatch):
    """Several chunks, unverified ends, requests that draft nothing or have no prediction."""
    monkeypatch.setattr(prediction_lookup, "search_chunk", lambda *_: 16)
    rng = np.random.default_rng(seed)
    vocabulary = int(rng.integers(2, 12))
    texts = [markov(rng, int(rng.integers(40, 120)), vocabulary) for _ in range(4)]
    edited = [np.delete(text, rng.integers(0, len(text), 5)) for text in texts]
    begins = [int(rng.integers(2, 9)) for _ in texts]
    predictions = [(b, text[b:].tolist()) for b, text in zip(begins, edited, strict=True)]
    compared = Compared([*predictions[:3], (begins[3], [])])
    ends, drafted = np.array(begins) + 1, 0
    for _ in range(12):
        above = [rng.integers(0, vocabulary, rng.integers(0, 3)) for _ in texts]
        given = [(text[:end], more) for text, end, more in zip(texts, ends, above, strict=True)]
        drafts = compared.drafts(given, rng.integers(0, 8, 4).tolist())
        assert not drafts[3]
        drafted += sum(map(len, drafts))
        ends = np.minimum(ends + rng.integers(1, 6, 4), [len(text) for text in texts])
    assert drafted


@pytest.mark.every_kernel
def test_it_goes_on_from_where_the_answer_stands():
    draft = one([10, 11, 12, 13, 14])
    assert draft([1, 2, 10]) == [11, 12, 13]
    assert draft([1, 2, 10, 11, 12, 13]) == [14]
    # The prediction has ended.
    assert draft([1, 2, 10, 11, 12, 13, 14]) == []


def test_it_finds_its_place_after_a_difference():
    draft = one([10, 11, 12, 13, 14, 15, 16])
    assert draft([1, 2, 10, 11]) == [12, 13, 14]
    # Tokens that it does not have, then those that it goes on with; tokens that are left out.
    assert draft([1, 2, 10, 11, 90]) == []
    assert draft([1, 2, 10, 11, 90, 91, 12]) == [13, 14, 15]
    assert draft([1, 2, 10, 11, 90, 91, 12, 15]) == [16]


def test_the_longest_match_then_the_nearest_place():
    """As predicted, then after the last place, then before it."""
    draft = one([5, 6, 7, 5, 8, 9, 5, 6, 4])
    assert draft([1, 2, 5], most=1) == [6]
    assert draft([1, 2, 5, 6, 7, 5], most=1) == [8]
    assert draft([1, 2, 5, 6, 7, 5, 33, 5], most=1) == [8]
    assert draft([1, 2, 5, 6, 7, 5, 33, 5, 8, 9, 5, 6, 4, 33, 7], most=1) == [5]
    again = one([5, 1, 5, 2, 5, 3])
    assert again([1, 2, 5, 1, 5], most=1) == [2]
    assert again([1, 2, 5, 1, 5, 33, 5], most=1) == [3]
    assert again([1, 2, 5, 1, 5, 33, 34, 5], most=1) == [3]
    again = one([5, 1, 5, 2, 5, 3])
    assert again([1, 2, 5, 1, 5], most=1) == [2]
    assert again([1, 2, 5, 1, 5, 33, 34, 5], most=1) == [2]


def test_the_prompt_is_not_matched():
    """Its last tokens stand in the prediction, before what the answer does not begin with."""
    draft = one([7, 3, 4, 1, 2, 7, 6], begin=2)
    assert draft([1, 2, 7]) == [3, 4, 1]
    assert one([7, 3], begin=2)([1, 2]) == []


def test_an_unverified_end_moves_nothing():
    draft = one([10, 11, 12, 10, 13])
    assert draft([1, 2, 10], [11, 12]) == [10, 13]
    assert draft([1, 2, 10], [11, 12, 10]) == [13]
    assert draft([1, 2, 10]) == [11, 12, 10]


def test_longer_matches_than_are_compared():
    """Runs of one token: nearest to where an answer that goes on as predicted stands."""
    run = [4] * (LONGEST + 9)
    draft = one([*run, 8, 9])
    assert draft([1, 2, *run[:-1]]) == [4, 8, 9]


def test_a_prediction_that_does_not_fit_is_cut():
    draft = Compared([(2, [*range(10, 30)])], width=5).drafts
    assert draft([([1, 2, 12], [])], [8]) == [[13, 14]]


def test_a_slot_that_is_given_to_another_request():
    compared = Compared([(2, [10, 11, 12])])
    assert compared.drafts([([1, 2, 10, 11], [])], [4]) == [[12]]
    compared.lookup.add_request(MAX_NUM_REQS - 1, 3, [])
    compared.plain[0] = Prediction(np.zeros(0, np.int32), 3)
    assert compared.drafts([([1, 2, 10, 11], [])], [4]) == [[]]


def test_padding_drafts_nothing():
    compared = Compared([(2, [10, 11, 12])])
    requests = Requests([([1, 2, 10], []), ([1, 2, 10], [])], [2, 0])
    requests.state.slot[1], requests.state.base[1] = -1, 0
    compared.lookup(requests.state, requests.text)
    assert requests.state.drafted[0].tolist() == [2, 0]
    requests.guarded.assert_guards()
