"""The choice between sources: what it learns, and what it remembers."""

import numpy as np

from vllm_hsd.core.levels import Lookup
from vllm_hsd.core.sources import RETRY_ROUNDS, SourceChoice

SLOT, ROW = np.array([1]), np.array([0])
ROOM = np.array([4])
SURE, GAINED = np.ones(1), np.zeros(1)


def choice_of(num_lookups: int, drafter_cost: float | None = None) -> SourceChoice:
    return SourceChoice(num_lookups, drafter_cost, 3, 4, 0.05)


def offer(tokens: list[int], acceptance: float = 0.6) -> Lookup:
    token_ids = np.array([[*tokens, 0, 0, 0, 0][:4]])
    confidence = acceptance ** np.arange(1, 5)
    return Lookup(token_ids, np.array([len(tokens)]), confidence[None])


def rounds(choice: SourceChoice, offers: list[Lookup], continuation: list[int], count: int) -> None:
    """Verdicts: after `count` offers the text went on by `continuation`."""
    text = np.array([[9, *continuation]], dtype=np.int32)
    for _ in range(count):
        choice.remember_first(SLOT, np.array([1]), offers, np.array([True]))
        choice.score(text, ROW, SLOT, np.array([text.shape[1]]))


def best(choice: SourceChoice, offers: list[Lookup]) -> tuple[int, int]:
    source, counts, _ = choice.best(SLOT, offers, ROOM, SURE, GAINED)
    return int(source[0]), int(counts[0])


def test_the_surest_offer_is_used():
    offers = [offer([1, 2], 0.5), offer([3, 4, 5, 6], 0.8), offer([])]
    assert best(choice_of(3), offers) == (1, 4)
    assert best(choice_of(1), [offer([])]) == (-1, 0)


def test_a_source_that_fails_is_passed_over_though_it_was_not_used():
    offers = [offer([1, 2, 3, 4], 0.8), offer([5, 6, 7, 8], 0.6)]
    choice = choice_of(2)
    assert best(choice, offers) == (0, 4)
    rounds(choice, offers, [5, 6, 7, 8, 9], count=5)  # 25 tokens
    assert best(choice, offers) == (1, 4)
    rounds(choice, offers, [0], count=100)
    assert best(choice, offers) == (-1, 0)
    rounds(choice, offers, [1, 2, 3, 4, 5], count=15)
    assert best(choice, offers) == (0, 4)


def test_a_draft_ends_where_acceptance_is_unlikely():
    assert best(choice_of(1), [offer([1, 2, 3, 4], 0.3)]) == (0, 2)


def test_an_offer_after_a_text_that_changed_says_nothing():
    choice, offers = choice_of(1), [offer([5, 6])]
    choice.remember_first(SLOT, np.array([3]), offers, np.array([True]))
    choice.score(np.array([[9, 9, 9, 9, 9]], dtype=np.int32), ROW, SLOT, np.array([3]))
    choice.score(np.array([[9, 9, 9, 9, 9]], dtype=np.int32), ROW, SLOT, np.array([5]))
    assert choice.scale(0, SLOT) == 1


def test_a_drafter_is_passed_over_and_tried_again():
    choice = choice_of(1, drafter_cost=0.2)
    assert choice.drafts(SLOT, ROOM).all()
    wrong = np.array([[1, 1, 1, 1]])
    text = np.array([[9, 2, 2]], dtype=np.int32)
    for _ in range(60):
        choice.remember(1, SLOT, np.array([1]), wrong, np.array([4]), np.full((1, 4), 0.7))
        choice.score(text, ROW, SLOT, np.array([3]))
    assert not choice.drafts(SLOT, ROOM).any()
    for _ in range(RETRY_ROUNDS):
        choice.note_use(SLOT, choice.drafts(SLOT, ROOM))
    assert choice.drafts(SLOT, ROOM).all()
    choice.note_use(SLOT, np.array([True]))
    assert not choice.drafts(SLOT, ROOM).any()


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
