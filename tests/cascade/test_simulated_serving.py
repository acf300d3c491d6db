"""The one rule of the budget on simulated serving; time is counted, not measured."""

import numpy as np
import pytest
from support.marks import slow_but
from support.simulated_serving import (
    REQUEST,
    Drafter,
    Guess,
    Serving,
    compute_bound,
    cpu,
    memory_bound,
)

from vllm_hsd.budget.constants import FIRST_PAUSE, LONGEST_PAUSE, SEARCH_PAUSE
from vllm_hsd.cascade.level import StepLevels

TARGETS = [memory_bound, cpu, compute_bound]


def model(target, rate, share: float, **settings) -> Drafter:
    """A pass takes a share of the target's step, and 2 % more per token."""
    return Drafter(rate, lambda n: share * target(1) * (1 + 0.02 * (n - 1)), **settings)


# What there is, and the fixed lengths of it that it is compared with.
SCENARIOS = {
    "lookup": (lambda target: [Guess(0.85, 0.6)], [(2,), (8,)]),
    "rare lookup": (lambda target: [Guess(0.3, 0.3)], [(2,)]),
    "cheap model": (lambda target: [model(target, 0.8, 0.1)], [(2,), (5,), (8,)]),
    "costly model": (lambda target: [model(target, 0.45, 0.25)], [(1,), (2,)]),
    "quantized": (lambda target: [model(target, 0.93, 0.12, sureness=0.2)], [(3,), (5,), (8,)]),
    "lookup below a model": (lambda target: [Guess(0.6, 0.6), model(target, 0.8, 0.15)], [(2, 5)]),
    "two models": (lambda target: [model(target, 0.6, 0.03), model(target, 0.85, 0.2)], [(3, 8)]),
}


def speedup(target, levels, size: int, fixed=None) -> float:
    """Over no drafts, once learned."""
    serving = Serving(target, levels, size, fixed)
    if fixed is None:
        serving.run(400 // size + 100)
    # Several trials of what loses.
    return serving.run(400 // size + 400) * target(size) / size


# Each scenario, target and size once; one request takes sixteen times the steps.
FAST = {
    ("lookup", cpu, 4),
    *((name, compute_bound, 16) for name in ("rare lookup", "cheap model", "two models")),
    *((name, memory_bound, 16) for name in ("costly model", "lookup below a model")),
    ("quantized", cpu, 16),
}
SIZES = [(target, size) for size in (16, 1) for target in TARGETS] + [(cpu, 4)]


@pytest.mark.parametrize(
    ("scenario", "target", "size"),
    slow_but(FAST, [(scenario, *size) for scenario in SCENARIOS for size in SIZES]),
)
def test_it_is_near_the_best_fixed_choice_and_never_slower_than_no_drafts(scenario, target, size):
    make, lengths = SCENARIOS[scenario]
    learned = speedup(target, make(target), size)
    fixed = [speedup(target, make(target), size, length) for length in lengths]
    assert learned > 0.93 * max(fixed)
    assert learned > 0.95


def rare() -> list:
    return [Guess(0.3, 0.3)]


def rare_next_to_a_head() -> list:
    return [Guess(0.5, 0.15), Drafter(0.2, lambda _: 0.01, verifies=False)]


@pytest.mark.parametrize(
    ("target", "size", "levels"),
    [
        (compute_bound, 10, rare),
        (lambda tokens: 0.061 if tokens <= 10 else 0.073 + 0.0005 * tokens, 10, rare),
        (lambda tokens: 0.045 + 0.016 * np.ceil(tokens / 16), 16, rare_next_to_a_head),
    ],
    ids=["steep", "a step", "stairs"],
)
def test_steps_without_drafts_are_not_timed_with_those_of_a_token_more(target, size, levels):
    """Else the first draft seems to be free where a batch fills a tile of a matrix."""
    assert speedup(target, levels(), size) > 0.97


def test_requests_that_begin_do_not_end_the_drafts_of_others():
    """A prompt, or a request before its first draft, makes a batch of a size that does not last."""
    serving = Serving(cpu, [model(cpu, 0.8, 0.1)], 4, prompt=60)
    serving.run(200)
    serving.run(400)
    assert np.count_nonzero(serving.lengths[-400:]) > 390


def test_what_one_batch_size_gained_is_no_measure_of_another():
    """Else a token is dear where few requests gained much before."""
    alone, always = (Serving(cpu, [Guess(0.9, 0.8)], 16) for _ in range(2))
    alone.use(1)
    for serving in (alone, always):
        serving.run(200)
        serving.use(16)
    assert alone.run(40) > 0.92 * always.run(40)


def test_one_configuration_beats_every_fixed_one_where_requests_differ():
    rates = np.where(np.arange(16) % 2, 0.9, 0.05)
    learned = speedup(memory_bound, [Guess(rates)], 16)
    fixed = [speedup(memory_bound, [Guess(rates)], 16, (k,)) for k in (2, 4, 8)]
    assert learned > 1.03 * max(fixed)


@pytest.mark.parametrize("found", [0.0, 0.02])
def test_searches_that_find_next_to_nothing_cost_next_to_nothing(found):
    plain = cpu(12)
    serving = Serving(cpu, [Guess(0.5, found, seconds=0.1 * plain)], 12)
    serving.run(200)
    assert serving.run(400) * plain / 12 > 0.985


def test_a_step_without_a_search_is_not_charged_for_the_last_one():
    serving = Serving(cpu, [Guess(0.5, 0.0, seconds=0.1 * cpu(12))], 12)
    charged = []
    for _ in range(200):
        serving.run(1)
        charged.append(serving.budget.budget.drafting_seconds)
    assert 0.0 in charged and max(charged) > 0.0


@pytest.mark.parametrize(
    ("sizes", "search", "known", "least"),
    [([12, 24] * 30, 0.1 * cpu(12), 20, 0.98), (range(64, 8, -1), 0.1 * cpu(32), 0, 0.97)],
    ids=["swings", "falls"],
)
def test_a_load_that_changes_does_not_make_searches_pay(sizes, search, known, least):
    """Each size of a load that falls is a new one, and one search tells much of a large batch."""
    serving, ratios = Serving(cpu, [Guess(0.5, 0.0, seconds=search)], max(sizes)), []
    for size in sizes:
        serving.use(size)
        ratios.append(serving.run(8) * cpu(size) / size)
    assert np.mean(ratios[known:]) > least


def test_what_is_not_known_yet_costs_little_in_a_large_batch():
    """A server that has just started tries one request, and no more than twice what it has seen."""
    serving = Serving(compute_bound, [Guess(0.1, 1.0, 0.5)], 64)
    assert serving.run(100) * compute_bound(64) / 64 > 0.97


def test_trials_do_not_wait_for_searches():
    """A lookup that is as sure of every token: searches do not say that texts repeat now."""
    rates = np.where(np.arange(2) < 1, 0.02, 0.95)
    serving = Serving(cpu, [Guess(rates, confidence=0.3)], 2)
    serving.active = np.arange(1)
    serving.run(1500)
    # As after many more.
    serving.budget.budget.trials.pause[:] = LONGEST_PAUSE
    serving.active = np.arange(1, 2)
    serving.run(LONGEST_PAUSE + 200)
    assert serving.run(100) * cpu(1) > 1.5


@pytest.mark.parametrize("verifies", [False, True])
def test_next_to_a_head_lookups_search_where_they_gain_more(verifies):
    """A model that takes from them has to know what they offer; both are as good by themselves."""
    rates = np.where(np.arange(2) < 1, 0.1, 0.95)
    head = Drafter(0.7, lambda _: 0.05 * cpu(1), verifies=verifies)
    serving = Serving(cpu, [Guess(rates, 1.0, np.array([0.2, 0.95])), head], 2)
    searches = []
    for request in range(2):
        serving.active = np.arange(request, request + 1)
        serving.run(400)
        before = serving.budget.budget.times[0].observed
        serving.run(90)
        searches.append(serving.budget.budget.times[0].observed - before)
    assert searches == ([10, 90] if not verifies else [90, 90])


def test_searches_are_found_to_pay_again_within_a_pause():
    rates, confidence = np.where(np.arange(24) < 12, [[0.02], [0.3]], [[0.95], [0.95]])
    serving = Serving(cpu, [Guess(rates, 1.0, confidence, 0.02 * cpu(12))], 24)
    serving.active = np.arange(12)
    serving.run(400)
    assert np.count_nonzero(serving.lengths[-100:]) < 20
    serving.active = np.arange(12, 24)
    serving.run(SEARCH_PAUSE + 1)
    assert any(serving.lengths[-2:])
    assert serving.run(100) * cpu(12) / 12 > 1.5


def test_the_time_without_drafts_is_not_old_where_drafts_hardly_gain():
    serving = Serving(lambda n: 0.07 + 0.003 * n, [Guess(0.6, 0.3, 0.6)], 12)
    serving.run(400)
    drafting = np.array(serving.lengths[-4 * FIRST_PAUSE :]) > 0
    assert drafting.any() and not drafting.all()


def test_a_first_step_that_was_slow_does_not_make_drafts_free():
    """It is a step without drafts, and where all of them pay there is no other of that size."""
    slow = [1.3]

    def tiles(tokens):
        """Of 16 rows, as matrix units multiply them."""
        taken = np.interp(tokens, [1, 16, 32, 48, 64, 96], [40, 55, 63, 75, 85, 102])
        return taken / 1e3 * (slow.pop() if slow else 1.0)

    serving = Serving(tiles, [Guess(0.3, 0.3, 0.3)], 64)
    serving.run(60)
    assert serving.run(120) * tiles(64) / 64 > 0.98


def test_a_step_without_levels_is_no_search():
    serving = Serving(cpu, [Guess(0.85, 0.6), model(cpu, 0.8, 0.1)], 4)
    serving.run(50)
    budget = serving.budget.budget
    known = budget.times[0].observed, budget.acceptance.drafts.copy()
    serving.budget.select = lambda *_: StepLevels()
    serving.run(10)
    assert budget.times[0].observed == known[0]
    assert (budget.acceptance.drafts == known[1]).all()


def test_it_turns_when_the_load_swings():
    serving = Serving(compute_bound, [model(compute_bound, 0.9, 0.05)], 64)
    for _ in range(2):
        for size, steps in ((1, 300), (64, 100)):
            serving.use(size)
            serving.run(steps)
    for size, least in ((1, 1.3), (64, 0.97)):
        serving.use(size)
        serving.run(50)
        assert serving.run(50) * compute_bound(size) / size > least


def test_a_machine_that_becomes_slower_for_a_while_does_not_end_drafting():
    slow = [1.0]
    serving = Serving(lambda tokens: slow[0] * cpu(tokens), [Guess(0.85, 0.6)])
    serving.run(100)
    steady = serving.run(200)
    for factor in (5.0, 1.0, 3.0, 1.0):
        slow[0] = factor
        serving.run(100)
    assert serving.run(300) > 0.85 * steady


@pytest.mark.slow
def test_drafts_are_as_long_as_is_cheapest():
    """A model below a target whose passes over two tokens take longer than those over three."""
    seconds = np.array([229, 266, 195, 202, 191, 190, 238, 253, 261]) / 1e3

    def target(tokens):
        return float(np.interp(tokens, np.arange(1, 10), seconds))

    def small(tokens):
        return 0.34 * target(tokens)

    found = [Serving(target, [Drafter(0.6, small)], fixed=(n,)).run(800) for n in (1, 2, 4)]
    serving = Serving(target, [Drafter(0.6, small)])
    serving.run(300)
    assert serving.run(1500) > 0.93 * max(found)


def test_what_loses_is_tried_ever_more_rarely():
    serving = Serving(compute_bound, [model(compute_bound, 0.1, 2.0)], 2)
    serving.run(2500)
    assert np.count_nonzero(serving.lengths[500:]) < 0.02 * 2000


class Kinds(Guess):
    """Requests of two kinds in turn: new text, where little repeats, and edits, where most does."""

    def start(self, texts, clock, seed) -> None:
        self.is_edit = np.arange(texts.shape[1]) // REQUEST % 2 == 1
        super().start(texts, clock, seed)
        right = np.random.default_rng(seed).random(texts.shape) < np.where(self.is_edit, 0.97, 0.1)
        self.guesses = np.where(right, texts, texts + 1)

    def lookup(self, texts, requested):
        self.confidence = np.where(self.is_edit[texts.ends], 0.9, 0.3)
        return super().lookup(texts, requested)


def test_a_lookup_is_taken_by_its_offer_and_not_by_another_text():
    """Also of the first edit after a text in which lookups failed."""
    serving = Serving(cpu, [Kinds(0.5), model(cpu, 0.8, 0.35)], 1)
    serving.ends[:], serving.cached[:] = 4, 3
    tokens, seconds = np.zeros(4), np.zeros(4)
    while (before := int(serving.ends[0])) < 4 * REQUEST:
        rate = serving.run(1)
        emitted = int(serving.ends[0]) - before
        tokens[before // REQUEST] += emitted
        seconds[before // REQUEST] += emitted / rate
    # New text and edits in turn, over no drafts.
    new, edit, new_again, edit_again = tokens / seconds * cpu(1)
    assert min(new, new_again) > 1.1 and min(edit, edit_again) > 5
