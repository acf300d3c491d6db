"""What the scheduler's learned draft lengths take in."""

from types import SimpleNamespace

import pytest
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_hsd.config import CascadeConfig
from vllm_hsd.runner_v2.adaptive import LearnedLengths, make_scheduler
from vllm_hsd.runner_v2.spec_config import MAX_BATCH_SIZE, V2CascadeConfig

BY_SIZE = [0, 3, 3, 0]


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
    return LearnedLengths(BY_SIZE)


def test_a_large_batch_never_drafts(lengths):
    assert [lengths[3] for _ in range(300)] == [0] * 300


def test_a_small_batch_tries_both(lengths):
    assert {lengths[1] for _ in range(300)} == {0, 3}


@pytest.mark.parametrize(
    ("drafts", "drafting", "kind"),
    [([3, 3], True, "drafting"), ([2, 3], True, "drafting"), ([0, 0], False, "plain")],
)
def test_a_step_of_decodes_counts(lengths, drafts, drafting, kind):
    observed = []
    lengths.learned.observe = lambda *given: observed.append(given)
    lengths.step_ended(*step(drafts, drafting))
    ((size, drafted, emitted, _),) = observed
    assert (size, drafted, emitted) == (2, kind == "drafting", 2 + sum(drafts))


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
    lengths.learned.observe = lambda *observed: pytest.fail(f"took in {observed}")
    lengths.step_ended(*given)


@pytest.mark.parametrize("slots", [2, 32, 64, 65, 256])
@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("tokens", [15, 160, 8192])
def test_vllm_captures_the_target_with_and_without_drafts(slots, limit, tokens):
    """For the lengths of the table within its largest batch; what is learned is restored."""
    hsd = CascadeConfig.parse(
        {
            "num_speculative_tokens": 8,
            "levels": [{"model": "a", "num_tokens": 3}, {"model": "b"}],
            "adaptive": True,
            **({} if limit is None else {"disable_by_batch_size": limit}),
        }
    )
    config = object.__new__(V2CascadeConfig)
    config.hsd, config.num_speculative_tokens = hsd, 8
    most = limit or MAX_BATCH_SIZE
    config.num_speculative_tokens_per_batch_size = [(1, most, 8), (most + 1, most + 1, 0)]
    given = {"max_num_seqs": slots, "max_num_batched_tokens": tokens, "async_scheduling": True}
    scheduler_config = SimpleNamespace(**given)
    config.adapt(scheduler_config)
    # No more than torch.compile covers the tokens of; a request feeds five at once.
    most = min(most, tokens // 5)
    table = config.num_speculative_tokens_per_batch_size
    dense = build_dynamic_sd_schedule_lookup(table, slots, 8)
    assert set(dense[1:]) == {0, 8}
    scheduler = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=config, scheduler_config=scheduler_config),
        dynamic_sd_lookup=dense,
    )
    make_scheduler(lambda self: None, scheduler)
    last = min(slots, most)
    assert scheduler.dynamic_sd_lookup.by_size[1:] == [8] * last + [0] * (slots - last)
