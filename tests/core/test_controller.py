"""The controller on simulated serving: never slower than no drafts, near the best fixed choice.

Times are counted by the simulation, so no test depends on the clock. Fixed seeds; the margins hold
the noise of the simulated acceptance (a few percent at these numbers of steps).
"""

import numpy as np
import pytest
from support.simulated_serving import SimulatedServing, flat, model, steep

from vllm_hsd.core.controller import DepthController
from vllm_hsd.core.levels import Selection

SLOTS = 64
FIXED = [
    Selection(),
    *(Selection((0,), (k,)) for k in (2, 4, 8)),
    *(Selection((1,), (k,)) for k in (1, 2, 4, 8)),
    *(Selection((0, 1), (2, k)) for k in (2, 4, 8)),
]


def controller() -> DepthController:
    return DepthController([8, 8], [True, False], SLOTS, 2048)


@pytest.mark.parametrize("rate", [0.1, 0.85])
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("target", [flat, steep])
def test_it_is_never_slower_than_no_drafts_and_near_the_best_fixed_choice(target, batch, rate):
    serving = SimulatedServing(target, model, np.full(SLOTS, rate))
    slots = np.arange(batch)
    steps = 1500 // batch + 200
    fixed = {c: serving.tokens_per_second(c, slots, 1000 // batch + 40) for c in FIXED}
    adaptive = serving.adaptive_tokens_per_second(controller(), slots, steps)
    assert adaptive > 0.97 * fixed[Selection()]
    assert adaptive > 0.90 * max(fixed.values())


def test_one_configuration_beats_every_fixed_one_where_requests_differ():
    rates = np.where(np.arange(SLOTS) % 2, 0.9, 0.05)
    serving = SimulatedServing(flat, model, rates)
    slots = np.arange(32)
    fixed = max(serving.tokens_per_second(c, slots, 150) for c in FIXED)
    adaptive = serving.adaptive_tokens_per_second(controller(), slots, 400)
    assert adaptive > 1.03 * fixed


def test_it_turns_within_fifty_steps_when_the_load_swings():
    serving = SimulatedServing(steep, model, np.full(SLOTS, 0.9))
    learned = controller()
    single, crowd = np.arange(1), np.arange(64)
    for _ in range(2):
        serving.adaptive_tokens_per_second(learned, single, 300)
        serving.adaptive_tokens_per_second(learned, crowd, 100)
    serving.adaptive_tokens_per_second(learned, single, 50)
    assert learned.best.levels
    serving.adaptive_tokens_per_second(learned, crowd, 50)
    plain = serving.tokens_per_second(Selection(), crowd, 50)
    assert serving.adaptive_tokens_per_second(learned, crowd, 50) > 0.97 * plain


def test_losing_candidates_are_tried_ever_more_rarely():
    serving = SimulatedServing(steep, lambda n: 5 * steep(n), np.full(SLOTS, 0.2))
    learned, slots = controller(), np.arange(4)
    serving.adaptive_tokens_per_second(learned, slots, 500)
    before = [c.runs for c in learned.candidates if c.levels]
    serving.adaptive_tokens_per_second(learned, slots, 4000)
    tried = sum(c.runs for c in learned.candidates if c.levels) - sum(before)
    assert tried < 0.02 * 4000


def test_a_request_that_rejects_drafts_gets_none_while_others_keep_theirs():
    rates = np.where(np.arange(SLOTS) < 2, 0.95, 0.02)
    serving = SimulatedServing(lambda n: 0.05 + 0.005 * n, lambda n: 0.0005 * n, rates)
    learned, slots = controller(), np.arange(4)
    serving.adaptive_tokens_per_second(learned, slots, 400)
    lengths = []
    for _ in range(100):
        choice, chosen = learned.choose(slots, np.full(4, 8))
        serving.step(choice, chosen, slots, learned)
        lengths.append(chosen)
    mean = np.mean(lengths, axis=0)
    assert mean[:2].min() > 0.5 > 0.2 > mean[2:].max()


def test_drafts_keep_to_what_is_allowed():
    serving = SimulatedServing(flat, model, np.full(SLOTS, 0.9))
    learned, slots = controller(), np.arange(6)
    most = np.array([0, 1, 2, 3, 8, 0])
    for _ in range(300):
        choice, lengths = learned.choose(slots, most)
        assert np.all(lengths <= most)
        if choice.levels:
            assert choice.draft_lengths[-1] <= 8 and len(choice.draft_lengths) == len(choice.levels)
        serving.step(choice, lengths, slots, learned)


def test_an_empty_batch_gets_no_drafts():
    choice, lengths = controller().choose(np.arange(0), np.arange(0))
    assert choice == Selection() and len(lengths) == 0


def test_lengths_are_kept_for_a_few_steps_and_looked_at_for_a_new_request():
    serving = SimulatedServing(
        lambda n: 0.05 + 0.005 * n, lambda n: 0.0005 * n, np.full(SLOTS, 0.9)
    )
    learned, slots, most = controller(), np.arange(4), np.full(4, 8)
    serving.adaptive_tokens_per_second(learned, slots, 400)
    survival, looks = learned.acceptance.survival, []
    learned.acceptance.survival = lambda *args: looks.append(learned.step) or survival(*args)
    learned.next_plan = learned.step + 100
    learned.trial = None
    for _ in range(40):
        learned.choose(slots, most)
    assert 9 <= len(looks) <= 11
    before = len(looks)
    for _ in range(4):
        learned.acceptance.forget(2)
        learned.choose(slots, most)
    assert len(looks) == before + 4
