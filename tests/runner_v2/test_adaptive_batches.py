"""What the scheduler's learned draft lengths take in, and for whom they stay as configured."""

from types import SimpleNamespace

import pytest
from vllm import SamplingParams

from vllm_hsd.runner_v2.adaptive import LearnedLengths

BY_SIZE = [0, 3, 3, 0]


def request(seed: int | None = None, temperature: float = 1.0) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SamplingParams(seed=seed, temperature=temperature))


def step(drafts: list[int], drafting: bool, new: list | None = None, extra: int = 0):
    """A step in which request i verifies drafts[i] tokens; `extra` tokens of a prompt."""
    ids = [str(i) for i in range(len(drafts))]
    given = SimpleNamespace(
        num_scheduled_tokens={i: 1 + n + extra for i, n in zip(ids, drafts, strict=True)},
        scheduled_spec_decode_tokens={i: [-1] * n for i, n in zip(ids, drafts, strict=True) if n},
        num_spec_tokens_to_schedule=3 * drafting,
        scheduled_new_reqs=new or [],
    )
    return given, SimpleNamespace(sampled_token_ids=[[5] * (1 + n) for n in drafts])


@pytest.fixture
def lengths() -> LearnedLengths:
    return LearnedLengths(SimpleNamespace(running=[request()]), BY_SIZE)


def test_a_large_batch_never_drafts(lengths):
    assert [lengths[3] for _ in range(300)] == [0] * 300


def test_next_to_a_seeded_sampled_request_lengths_stay_as_configured(lengths):
    lengths.scheduler.running = [request(), request(seed=1)]
    assert {lengths[2] for _ in range(300)} == {3}
    # A greedy text does not depend on draws.
    lengths.scheduler.running = [request(seed=1, temperature=0.0)]
    assert {lengths[1] for _ in range(300)} == {0, 3}


@pytest.mark.parametrize(
    ("drafts", "drafting", "kind"),
    [([3, 3], True, "drafting"), ([2, 3], True, "drafting"), ([0, 0], False, "plain")],
)
def test_a_step_of_decodes_counts(lengths, drafts, drafting, kind):
    lengths.step_ended(*step(drafts, drafting))
    seen = {"drafting": lengths.learned.drafting, "plain": lengths.learned.plain}
    assert {name for name, times in seen.items() if not times.empty} == {kind}


@pytest.mark.parametrize(
    "given",
    [
        step([3, 0], True),  # one request has just begun to draft
        step([3, 3], False),  # the last drafts of a trial
        step([0, 0], True),  # the first step of a trial
        step([0, 0], False, extra=4),
        step([3, 3], True, new=["a prompt"]),
        step([], False),
    ],
)
def test_other_steps_do_not(lengths, given):
    lengths.step_ended(*given)
    assert lengths.learned.drafting.empty and lengths.learned.plain.empty
