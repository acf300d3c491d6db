"""The choice between sources: what it learns, and what it remembers."""

from unittest import mock

import numpy as np
from oracle.stand_ins import TableLookup

from vllm_hsd.core.cascade import Cascade
from vllm_hsd.core.levels import DraftBatch, FirstOf, LevelOptions, Lookup
from vllm_hsd.core.offers import Offers
from vllm_hsd.core.prices import Prices
from vllm_hsd.core.sources import DRAFTER_ACCEPTANCE, RETRY_ROUNDS, SourceChoice
from vllm_hsd.core.stopping import EntropyThresholds

SLOT, ROW = np.array([1]), np.array([0])
ROOM = np.array([4])
SURE, PLACED = np.ones(1), np.zeros(1, dtype=np.int64)


def choice_of(num_lookups: int, drafter_cost: float | None = None) -> SourceChoice:
    """With a request that must repeat: fixed prices, and nothing learned from other requests."""
    names = [str(i) for i in range(num_lookups + (drafter_cost is not None))]
    sources = FirstOf(names, [None] * num_lookups)
    if drafter_cost is not None:
        sources.drafter, sources.drafter_cost = mock.Mock(), drafter_cost
    choice = SourceChoice(sources, 3, 4)
    choice.price(None, np.ones(3, dtype=bool))
    return choice


def offer(tokens: list[int], acceptance: float = 0.6) -> Lookup:
    token_ids = np.array([[*tokens, 0, 0, 0, 0][:4]])
    confidence = acceptance ** np.arange(1, 5)
    return Lookup(token_ids, np.array([len(tokens)]), confidence[None])


def rounds(choice: SourceChoice, offers: list[Lookup], continuation: list[int], count: int) -> None:
    """Verdicts: after `count` offers the text went on by `continuation`."""
    text = np.array([[9, *continuation]], dtype=np.int32)
    for _ in range(count):
        choice.remember_first(SLOT, np.array([1]), Offers.of(offers), np.array([True]))
        choice.score(text, ROW, SLOT, np.array([text.shape[1]]))


def best(choice: SourceChoice, offers: list[Lookup]) -> tuple[int, int]:
    source, counts, _ = choice.best(SLOT, Offers.of(offers), ROOM, SURE, PLACED)
    return int(source[0]), int(counts[0])


def test_the_surest_offer_is_used():
    offers = [offer([1, 2], 0.5), offer([3, 4, 5, 6], 0.8), offer([])]
    assert best(choice_of(3), offers) == (1, 4)
    assert best(choice_of(1), [offer([])]) == (-1, 0)


def test_a_source_that_fails_is_passed_over_though_it_was_not_used():
    offers = [offer([1, 2, 3, 4], 0.8), offer([5, 6, 7, 8], 0.6)]
    choice = choice_of(2)
    choice.sources.min_acceptance = 0.2
    assert best(choice, offers) == (0, 4)
    rounds(choice, offers, [5, 6, 7, 8, 9], count=5)  # 25 tokens
    assert best(choice, offers) == (1, 4)
    rounds(choice, offers, [0], count=150)
    assert best(choice, offers) == (-1, 0)
    rounds(choice, offers, [1, 2, 3, 4, 5], count=30)
    assert best(choice, offers) == (0, 4)


def test_a_draft_ends_where_acceptance_is_unlikely():
    assert best(choice_of(1), [offer([1, 2, 3, 4], 0.3)]) == (0, 2)


def test_an_offer_after_a_text_that_changed_says_nothing():
    choice, offers = choice_of(1), [offer([5, 6])]
    choice.remember_first(SLOT, np.array([3]), Offers.of(offers), np.array([True]))
    choice.score(np.array([[9, 9, 9, 9, 9]], dtype=np.int32), ROW, SLOT, np.array([3]))
    choice.score(np.array([[9, 9, 9, 9, 9]], dtype=np.int32), ROW, SLOT, np.array([5]))
    assert choice.scale(0, SLOT) == 1


def drafter_tokens(choice: SourceChoice, confidence: float = DRAFTER_ACCEPTANCE) -> int:
    """Tokens of a drafter that is always as sure as that."""
    going, sure, drafted = choice.begins(SLOT, ROOM, SURE, PLACED), SURE.copy(), PLACED.copy()
    while going[0]:
        sure = sure * choice.acceptance_of(SLOT, np.array([confidence]), drafted)
        drafted = drafted + 1
        going = choice.goes_on(SLOT, ROOM - drafted, sure, drafted, drafted)
    return int(drafted[0])


def drafter_fails(choice: SourceChoice, count: int) -> None:
    wrong, text = np.array([[[1, 1, 1, 1]]]), np.array([[9, 2, 2]], dtype=np.int32)
    for _ in range(count):
        choice.remember(
            1,
            SLOT,
            np.array([1]),
            Offers(wrong, np.array([[4]]), np.full((1, 1, 4), DRAFTER_ACCEPTANCE)),
        )
        choice.score(text, ROW, SLOT, np.array([3]))


def test_a_drafter_is_passed_over_and_tried_ever_more_rarely():
    choice = choice_of(1, drafter_cost=0.13)
    assert drafter_tokens(choice) == 4
    drafter_fails(choice, 60)
    tried = [drafter_tokens(choice) for _ in range(1000)]
    assert set(tried) == {0, 1}
    gaps = np.diff(np.flatnonzero(tried))
    assert tried.index(1) == RETRY_ROUNDS and gaps[0] > RETRY_ROUNDS and np.all(np.diff(gaps) > 0)


def test_a_drafter_drafts_as_many_tokens_as_pay():
    assert drafter_tokens(choice_of(0, drafter_cost=0.05)) == 4
    assert drafter_tokens(choice_of(0, drafter_cost=0.3)) == 2
    assert drafter_tokens(choice_of(0, drafter_cost=0.8)) == 0


def test_a_drafter_stops_where_it_is_not_sure():
    assert drafter_tokens(choice_of(0, drafter_cost=0.13), confidence=0.9) == 4
    assert drafter_tokens(choice_of(0, drafter_cost=0.13), confidence=0.4) == 2
    assert drafter_tokens(choice_of(0, drafter_cost=0.13), confidence=0.1) == 1


def test_what_a_drafters_confidence_is_worth_is_learned():
    choice = choice_of(0, drafter_cost=0.13)
    choice.price(None, np.zeros(3, dtype=bool))
    assert drafter_tokens(choice, confidence=0.9) == 4
    text = np.array([[9, 2, 2, 2, 2, 2]], dtype=np.int32)
    for number in range(200):
        # Right when it is sure by half, wrong when it seems certain.
        right = number % 2
        offered = np.full((1, 1, 4), 2 if right else 1)
        sureness = np.full((1, 1, 4), 0.5 if right else 0.9)
        choice.remember(0, SLOT, np.array([1]), Offers(offered, np.array([[4]]), sureness))
        choice.score(text, ROW, SLOT, np.array([6]))
    assert drafter_tokens(choice, confidence=0.5) == 4
    assert drafter_tokens(choice, confidence=0.9) == 1


def test_a_forward_pass_is_worth_it_once_enough_requests_share_it():
    choice = choice_of(0, drafter_cost=0.1)
    slots = np.arange(3)
    choice.price(Prices(np.zeros(5), forward=1.5, size=3), np.zeros(3, dtype=bool))

    def drafting(sure: list[float]) -> list[int]:
        zero = np.zeros(3, dtype=np.int64)
        return choice.begins(slots, np.full(3, 4), np.array(sure), zero).tolist()

    assert drafting([1, 1, 1]) == [True, True, True]
    assert drafting([1, 0.5, 0.5]) == [False, False, False]


def test_a_lookup_goes_before_a_drafter_where_it_is_surer():
    sure, unsure = [offer([1, 2, 3, 4], 0.95)], [offer([1, 2], 0.3)]
    assert best(choice_of(1, drafter_cost=0.1), sure) == (0, 4)
    assert best(choice_of(1, drafter_cost=0.1), unsure) == (-1, 0)


def test_a_request_that_waits_keeps_what_it_knows():
    choice, offers = choice_of(2), [offer([1, 2]), offer([5, 6])]
    rounds(choice, offers, [5, 6, 7], count=4)
    scale = choice.scale(0, SLOT).item()
    kept = choice.set_aside(1)
    choice.forget(1)
    assert choice.scale(0, SLOT).item() == 1 and choice.scale(0, np.array([2])).item() == 1
    choice.restore(2, kept)
    assert choice.scale(0, np.array([2])).item() == scale


class Counting(TableLookup):
    """Expects the text to go on in steps of a fixed size."""

    def __init__(self, step: int):
        self.step = step

    def lookup(self, tokens, rows, slots, ends, requested) -> Lookup:
        last = tokens[rows, ends - 1].astype(np.int64)
        width = int(requested.max(initial=0))
        token_ids = last[:, None] + self.step * np.arange(1, width + 1)
        confidence = np.tile(0.7 ** np.arange(1, width + 1), (len(rows), 1))
        return Lookup(token_ids, requested.copy(), confidence)


def drafts_of(texts: list[list[int]], slots: list[int], rows: list[int]) -> list[list[list[int]]]:
    """Drafts of every text at each of its positions, from the fourth on, as one batch."""
    sources = FirstOf(["ones", "twos"], [Counting(1), Counting(2)])
    cascade = Cascade([sources], [LevelOptions(4)], num_slots=6)
    found: list[list[list[int]]] = [[] for _ in texts]
    for end in range(4, len(texts[0])):
        tokens = np.zeros((6, len(texts[0]) + 4), dtype=np.int32)
        of_slot, ends = np.zeros(6, dtype=np.int64), np.zeros(6, dtype=np.int64)
        for text, slot, row in zip(texts, slots, rows, strict=True):
            tokens[row, :end], of_slot[slot], ends[slot] = text[:end], row, end
        batch = DraftBatch(
            tokens=tokens,
            rows=of_slot,
            end=ends,
            cached=np.zeros((1, 6), dtype=np.int64),
            eos=np.full(6, -1),
            greedy=True,
            probs=None,
            uniforms=None,
            thresholds=EntropyThresholds.fresh(1, 6),
        )
        drafts = cascade.propose(batch, np.array(slots), np.full(len(slots), 4))
        for i, slot in enumerate(slots):
            found[i].append(drafts.token_ids[slot, : drafts.counts[slot]].tolist())
    return found


def test_requests_of_a_batch_choose_as_they_would_alone():
    ones, twos = list(range(30)), list(range(0, 60, 2))
    mixed = ones[:15] + [14 + 2 * i for i in range(1, 16)]
    together = drafts_of([ones, twos, mixed], slots=[4, 0, 2], rows=[0, 3, 1])
    for text, found in zip([ones, twos, mixed], together, strict=True):
        assert drafts_of([text], slots=[0], rows=[0]) == [found]
    assert together[0][-1] == [29, 30, 31, 32][: len(together[0][-1])] and together[0][-1]
    assert together[1][-1] == [58, 60, 62, 64][: len(together[1][-1])] and together[1][-1]
