"""One draft length per batch on simulated serving: time is counted, not measured."""

import numpy as np
import pytest

from vllm_hsd.budget.batch_budget import BatchBudget

LENGTHS, LARGEST = [8, 4, 2], 64


class Serving:
    """Steps of known times, spread by noise, in which each draft token is accepted with `rate`.

    Args:
        token_cost: what one more token adds to a step of one token.
        drafting: seconds of a draft.
        each: of each of its tokens; None for as many.
    """

    def __init__(self, token_cost: float, drafting: float, each: float | None = None) -> None:
        self.token_cost, self.drafting = token_cost, drafting
        self.each = drafting if each is None else each
        self.rng = np.random.default_rng(0)
        self.before = 0

    def tokens_per_second(self, choose, size: int, rate, steps: int, observe=None) -> float:
        """`rate`: of all tokens, or of each by its place."""
        tokens = spent = 0.0
        for _ in range(steps):
            length = choose(size)
            verified, self.before = self.before, length
            accepted = (
                (self.rng.random((size, verified)) < np.resize(rate, verified))
                .cumprod(axis=1)
                .sum(1)
            )
            kept = int(accepted.sum())
            drafting = self.drafting + self.each * length if length else 0.0
            seconds = 1 + self.token_cost * (size * (1 + verified) - 1) + drafting
            tokens, spent = tokens + size + kept, spent + seconds
            if observe is not None and verified == length:
                noise = np.exp(0.05 * self.rng.standard_normal())
                noise *= 10 if self.rng.random() < 0.01 else 1
                observe(length, accepted, seconds * noise)
        return tokens / spent

    def learned(self, learned: BatchBudget, size: int, rate, steps: int) -> float:
        return self.tokens_per_second(learned.choose, size, rate, steps, learned.observe)


@pytest.mark.parametrize("rate", [0.05, 0.4, 0.9])
@pytest.mark.parametrize("size", [1, 4, 16, 64])
@pytest.mark.parametrize("token_cost", [0.002, 0.05])
def test_it_is_as_fast_as_the_best_choice(token_cost, size, rate):
    serving = Serving(token_cost, drafting=0.05)
    fixed = [
        serving.tokens_per_second(lambda _, k=k: k, size, rate, 4000 // size + 200)
        for k in (0, *LENGTHS)
    ]
    speed = serving.learned(BatchBudget(LENGTHS, LARGEST), size, rate, 4000)
    assert speed > 0.96 * max(fixed)
    assert speed > 0.98 * fixed[0]


def test_it_turns_with_the_load_within_fifty_steps():
    serving, learned = Serving(0.06, drafting=0.02), BatchBudget(LENGTHS, LARGEST)
    for size in (1, 64, 1, 64):
        serving.learned(learned, size, 0.8, 200)
    for size, drafts in ((1, True), (64, False), (1, True)):
        serving.learned(learned, size, 0.8, 50)
        rates = learned.rates(size)
        assert (max(rates) > rates[0]) == drafts


@pytest.mark.parametrize("seed", range(4))
def test_steps_without_drafts_are_timed_at_each_load(seed):
    """Where a proposal is dear, the shortest draft may lose while longer ones seem to gain."""
    serving, learned = Serving(0.008, drafting=0.5, each=0.02), BatchBudget(LENGTHS, LARGEST)
    poor = [0.1, *[0.85] * 7]
    serving.rng = np.random.default_rng(seed)
    for size in (64, 1):
        serving.learned(learned, size, 0.9, 300)
    serving.learned(learned, 1, poor, 4000)
    assert serving.learned(learned, 1, poor, 1000) > 0.97


def test_what_loses_is_tried_ever_more_rarely():
    serving, learned = Serving(0.1, drafting=1.0), BatchBudget(LENGTHS, LARGEST)
    chosen = []

    def choose(size):
        chosen.append(learned.choose(size))
        return chosen[-1]

    serving.tokens_per_second(choose, 4, 0.1, 6000, learned.observe)
    assert np.count_nonzero(chosen[3000:]) <= 12 * len(LENGTHS)


def test_without_observations_it_drafts_as_configured():
    """Where every step holds a piece of a prompt no step tells anything."""
    learned = BatchBudget(LENGTHS, LARGEST)
    chosen = [learned.choose(3) for _ in range(5000)]
    assert chosen.count(max(LENGTHS)) > 0.97 * len(chosen)
