"""Whether a model reads a long prompt late: what the rest of the answer gains has to pay for it."""

import numpy as np
import pytest
from support.drafting_levels import drafting_levels

from vllm_hsd.budget.constants import LONGEST_PAUSE
from vllm_hsd.budget.draft_budget import DraftBudget
from vllm_hsd.budget.reading import Reading

STEP, LENGTH = 0.062, 8


def budget_of(requests: int) -> DraftBudget:
    """A model alone, of whose tokens 80 % were accepted, below a target of some speed."""
    budget = DraftBudget(drafting_levels([LENGTH], looks_up=False), requests)
    slots = np.arange(requests)
    for _ in range(40):
        for tokens in range(requests * (LENGTH + 1), requests - 1, -1):
            seconds = STEP + 0.002 * (tokens - 1)
            budget.times[-1].observe(tokens, seconds, apart=tokens == requests)
        budget.times[0].observe(requests, 0.0046)
    rng = np.random.default_rng(0)
    for _ in range(200):
        right = np.logical_and.accumulate(rng.random((requests, LENGTH)) < 0.8, axis=1).sum(1)
        sure = np.full((requests, LENGTH), 0.8)
        budget.learn_acceptance(0, 1, slots, np.full(requests, LENGTH), sure, right)
        budget.acceptance.count(0, 1, 1)
    # Nothing is due for a trial.
    budget.trials.pause[:] = LONGEST_PAUSE
    return budget


def reads(budget: DraftBudget, late: float, left: int, most: int | None = None) -> bool:
    """Whether one request is drafted for in any step of an answer of `left` tokens."""
    one = np.ones(1, dtype=np.int64)
    budget.forget(0)
    for step in range(left):
        allowed = (left if most is None else most) - step
        plan = budget.plan(0 * one, LENGTH * one, 1, None, np.full((1, 1), late), allowed * one)
        if plan.selection.levels:
            return True
        budget.drafted_for_target(0, 0 * one, LENGTH * one, 0 * one, 0.0)
        budget.step_ended(0 * one, 0 * one, 0 * one)
    return False


@pytest.mark.parametrize("left", [50, 100, 200])
def test_no_more_time_than_the_answer_takes_without_drafts(left):
    """Drafts spare over half of the seconds here."""
    assert reads(budget_of(1), 0.3 * left * STEP, left)
    assert not reads(budget_of(1), 0.9 * left * STEP, left)


def test_clients_do_not_say_how_long_answers_are():
    """They end after 50 tokens where 30,000 are allowed; the first answer tells."""
    budget, late = budget_of(1), 100 * STEP
    assert reads(budget, late, 50, most=30_000)
    reading = Reading(1, 2)
    assert reading.left(np.arange(2), np.array([30_000, 20])).tolist() == [30_000, 20]
    reading.left(np.arange(1), np.array([29_951]))
    reading.pays(np.arange(1), [(0.0, 1.0)] * 2, np.zeros((1, 1)), np.ones(1))
    reading.forget(0)
    assert reading.left(np.arange(2), np.array([30_000, 20])).tolist() == [50, 20]
    # One that goes on longer than any before is taken to have as many tokens to come.
    assert reading.left(np.arange(1), np.array([29_900])).tolist() == [100]
    budget.reading.answers.append(50)
    assert not reads(budget, late, 50, most=30_000)


@pytest.mark.parametrize("late", [0.0, 30.0])
def test_a_request_that_does_not_pay_is_left_out_and_others_draft(late):
    budget, slots = budget_of(4), np.arange(4)
    found = []
    for _ in range(3):
        missed = np.where(slots == 2, late, 0.0)[None]
        plan = budget.plan(slots, np.full(4, LENGTH), 4, None, missed, np.full(4, 100))
        found.append((plan.selection.most > 0).tolist())
    assert found == [[True, True, late == 0, True]] * 3
