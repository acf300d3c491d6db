"""The parts of the budget's one rule; `test_simulated_serving` serves the whole."""

import itertools

import numpy as np
import pytest
from support.drafting_levels import drafting_levels
from support.simulated_serving import LENGTH

from vllm_hsd.budget.constants import FIRST_PAUSE, LONGEST_PAUSE, SEARCH_PAUSE
from vllm_hsd.budget.draft_budget import DraftBudget
from vllm_hsd.budget.prices import Round, cut, further_tokens
from vllm_hsd.budget.trials import Searches
from vllm_hsd.cascade.level import DraftingLevel, LookupResult


def test_whether_a_draft_goes_on_is_not_settled_by_what_was_drawn_for_others():
    """Else another one, which the scheduler cuts for it, would be cut by its own tokens."""
    answers = {}
    for price in (0.1, 0.3, 0.5, 0.7, 0.9):
        for sure in (0.01, 0.5, 0.99):
            budget = DraftBudget(drafting_levels([8], looks_up=False), 2)
            budget.drafting = 2
            estimates = np.array([[0.5], [sure]])
            of_it = (
                np.arange(2),
                estimates,
                np.ones(2, dtype=np.int64),
                Round(price, np.full(8, 0.1)),
            )
            answers.setdefault(price, set()).add(bool(budget.goes_on(0, *of_it)[0]))
    assert all(len(each) == 1 for each in answers.values()), answers
    assert set().union(*answers.values()) == {False, True}


@pytest.mark.parametrize(("emitted", "worth"), [(1.0, False), (1.5, False), (3.0, True)])
def test_a_further_round_is_worth_all_tokens_that_it_adds(emitted, worth):
    """With a lookup below, a model's pass adds several: one alone does not pay for it."""
    budget = DraftBudget(drafting_levels([8, 8], looks_up=True), 1)
    further = Round(1.2, np.full(8, 0.05), emitted)
    found = budget.goes_on(1, np.zeros(1, int), np.full((1, 1), 0.9), np.ones(1, int), further)
    assert found.tolist() == [worth]


def test_a_search_that_the_clock_does_not_see_is_no_reason_to_stop():
    budget = DraftBudget([DraftingLevel(8, 8, looks_up=True)], 4)
    budget.times[-1].observe(1, 0.03)
    budget.searched(1, 1, 0.0, 0.5)


def test_all_requests_that_run_wait_for_a_search():
    budget = DraftBudget([DraftingLevel(8, 8, looks_up=True)], 16)
    for running in (1, 16):
        budget.times[-1].observe(running, 0.1)
    budget.searched(1, 16, 0.01, 0.0)
    ((_, cost),) = budget.searches.known.values()
    assert cost == pytest.approx(16 * 0.01 / 0.1)


def test_searches_of_a_size_that_pays_do_not_put_off_those_of_another():
    searches = Searches()
    for _ in range(100):
        searches.observe(0, 1, 0.0, 1.0)
    found = []
    for _ in range(3 * (SEARCH_PAUSE + 1)):
        searches.observe(1, 1, 2.0, 1.0)
        if searches.due(0):
            searches.observe(0, 1, 0.0, 1.0)
            found.append(searches.due(1))
    assert found == [True] * 3


def test_requests_without_drafts_are_in_the_goodput_of_their_batch():
    budget, slots = DraftBudget(drafting_levels([4], looks_up=True), 8), np.arange(8)
    for tokens in range(1, 40):
        budget.times[-1].observe(tokens, 0.04 + 0.004 * tokens)
    drafted = np.where(slots < 4, 2, 0)
    for _ in range(100):
        budget.drafted_for_target(0, slots, 2 + 0 * slots, drafted, 0.0)
        told = slots[:4], drafted[:4], np.full((4, 4), 0.9), drafted[:4]
        budget.learn_acceptance(0, 1, *told)
        budget.step_ended(slots, drafted, drafted)
    learned = budget.goodput[-1]
    # Two tokens a request in the mean, in a pass over 16 tokens in place of 8.
    assert learned.gain(8) == pytest.approx(2 * 0.072 / 0.104, rel=0.02)
    assert learned.gain(4) == 1.0


def test_tokens_along_branches_count_as_those_of_chains():
    found = []
    for accepted, followed in ((3, 0), (1, 2)):
        budget = DraftBudget(drafting_levels([LENGTH], looks_up=True), 1)
        one = np.ones(1, dtype=np.int64)
        budget.times[-1].observe(1, 0.1)
        budget.drafted_for_target(0, 0 * one, one, one, 0.0)
        budget.step_ended(0 * one, one, accepted * one, followed)
        found.append(budget.goodput[-1].gain(1))
    assert found[0] == found[1] > 1


@pytest.mark.parametrize("late, left, reads", [(0.1, 100, True), (4, 400, False), (4, 4000, True)])
def test_a_model_reads_a_text_for_what_lookups_have_left_to_gain(late, left, reads):
    """In each fourth step a lookup finds nothing: of 25 tokens one, in whose step a model gains."""
    budget = DraftBudget(drafting_levels([LENGTH] * 2, looks_up=True), 1)
    one, places = np.ones(1, dtype=np.int64), np.arange(LENGTH)
    budget.times[2].observe(1, 0.1)
    budget.times[2].observe(9, 0.12)
    budget.times[1].observe(1, 0.03)
    # Nothing is due for a trial.
    budget.trials.pause[:] = LONGEST_PAUSE
    found = []
    for step in range(24):
        count = LENGTH * (step % 4 < 3)
        estimates = 0.97 ** (1.0 + places[None, :count])
        offer = LookupResult(np.zeros((1, count), dtype=np.int64), one * count, estimates)
        plan = budget.plan(0 * one, LENGTH * one, 1, offer, np.array([[0.0], [late]]), left * one)
        found.append(1 in plan.selection.levels)
        assert found[-1] or plan.selection.levels == (0,) * (count > 0)
    assert found == [reads and step % 4 == 3 for step in range(24)]


@pytest.mark.parametrize(("running", "drafts"), [(1, True), (16, False)])
def test_a_models_pass_is_over_all_requests_that_run(running, drafts):
    """One of them may draft."""
    budget = DraftBudget(drafting_levels([LENGTH], looks_up=False), 16)
    one = np.ones(1, dtype=np.int64)
    for tokens in range(1, 40):
        budget.times[0].observe(tokens, 0.001 * tokens)
        budget.times[1].observe(tokens, 0.1)
    budget.trials.pause[:] = LONGEST_PAUSE
    plan = budget.plan(0 * one, LENGTH * one, running)
    assert bool(plan.selection.levels) == drafts


@pytest.mark.parametrize(("seconds", "trials"), [(0.001, 3), (1.0, 1)])
def test_later_trials_wait_until_their_drafts_are_a_small_share(seconds, trials):
    """One request drafts, and the model's passes are over all that run."""
    budget, slots = DraftBudget(drafting_levels([LENGTH], looks_up=False), 16), np.arange(16)
    for tokens in range(1, 200):
        budget.times[0].observe(tokens, seconds)
        budget.times[1].observe(tokens, 0.1 * tokens)
    for _ in range(FIRST_PAUSE * 4):
        budget.plan(slots, np.full(16, LENGTH), 16)
    assert budget.trials.ended.tolist() == [trials]


@pytest.mark.parametrize(
    ("verify", "further"),
    [
        ([0, 1, 2, 3], [1, 1, 1]),
        # Steeper from the second token on; dear only at first; at last as long as for one.
        ([0, 1, 3, 6], [1, 2, 3]),
        ([0, 3, 4, 4.5], [3, 3, 3]),
        ([0, 4, 2, 1], [1 / 3, -2, -1]),
    ],
)
def test_a_further_token_costs_what_those_up_to_the_cheapest_end_do(verify, further):
    """Else a larger pass is taken for as cheap as the smallest one, which is met no more."""
    assert further_tokens(np.array(verify, dtype=float)) == pytest.approx(np.array(further))


def test_a_level_that_verifies_nothing_takes_nothing_from_below():
    """Drafts of a free lookup that are always accepted, below a head and below a model."""
    for verifies in (False, True):
        levels = DraftingLevel(8, 4, looks_up=True), DraftingLevel(8, 8, verifies=verifies)
        budget = DraftBudget(levels, 1)
        budget.times[1].observe(1, 0.01)
        feeders, _ = budget._cheapest_paths(np.zeros(1, dtype=np.int64), 1, None, np.zeros((2, 1)))
        assert (feeders[1] is not None) == verifies
        assert budget.everything.levels == ((0, 1) if verifies else (1,))


def test_tokens_are_kept_while_their_survival_pays():
    survival = np.array([[0.9, 0.8, 0.1], [0.5, 0.2, 0.0]])
    price = 0.3 * np.arange(7)
    free = np.zeros(4)
    kept, net = cut(survival, price, free)
    assert kept.sum(1).tolist() == [2, 1] and net == pytest.approx(0.9 + 0.8 + 0.5 - 0.9)
    kept, net = cut(survival, 2 * np.arange(7.0), free)
    assert not kept.any() and net == 0
    # The first two tokens of the pass are free.
    kept, net = cut(survival, np.maximum(np.arange(7.0) - 2, 0), free)
    assert kept.sum(1).tolist() == [2, 0] and net == pytest.approx(1.7)


@pytest.mark.parametrize("fill", [0.4, 1.0])
def test_no_other_lengths_of_drafts_gain_more(fill):
    """All of them are tried, at random prices and survivals."""
    rng, lengths = np.random.default_rng(0), np.array(list(itertools.product(range(4), repeat=3)))
    for _ in range(200):
        survival = np.cumprod(rng.random((3, 3)), axis=1) * (np.arange(3) < rng.integers(4))
        verify, drafting = (np.cumsum(rng.random(n)) * 0.3 for n in (10, 4))
        verify[0] = drafting[0] = 0
        held = np.arange(3) < lengths[..., None]
        more = (fill * (held & (survival > 0)).sum((1, 2))).astype(int)
        gains = fill * (held * survival).sum((1, 2)) - verify[more] - drafting[lengths.max(1)]
        kept, net = cut(survival, verify, drafting, fill)
        assert net == pytest.approx(max(gains.max(), 0))
        assert (kept.sum(1) == lengths[gains.argmax()]).all() or net == 0
