"""What the scheduler's learned draft lengths take in."""

from types import SimpleNamespace

import pytest
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.config.sizes import MAX_BATCH_SIZE
from vllm_hsd.host.adaptive import LearnedLengths, learn_lengths
from vllm_hsd.host.spec_config import CascadeSpeculativeConfig

LIMIT = 2


def step(drafts: list[int], length: int, new: list | None = None, extra: int = 0):
    """A step in which request i verifies drafts[i] tokens; `extra` tokens of a prompt."""
    ids = [str(i) for i in range(len(drafts))]
    given = SimpleNamespace(
        num_scheduled_tokens={i: 1 + n + extra for i, n in zip(ids, drafts, strict=True)},
        scheduled_spec_decode_tokens={i: [-1] * n for i, n in zip(ids, drafts, strict=True) if n},
        num_spec_tokens_to_schedule=length,
        scheduled_new_reqs=new or [],
    )
    return given, SimpleNamespace(sampled_token_ids=[[5] * (1 + n) for n in drafts])


@pytest.fixture
def lengths() -> LearnedLengths:
    return LearnedLengths([0, 3, 1, 0], LIMIT)


@pytest.mark.parametrize(("size", "tried"), [(1, {0, 1, 3}), (2, {0, 1, 3}), (3, {0})])
def test_small_batches_try_all_lengths_and_a_large_one_none(lengths, size, tried):
    assert {lengths[size] for _ in range(300)} == tried


def test_rows_of_a_list_are_one_draft():
    """Of each request four rows with their roots are scheduled, and one is accepted."""
    lengths = LearnedLengths([0, 15, 7, 0], LIMIT, rows=4)
    assert lengths.learned.lengths == [0, 1, 3]
    assert {lengths[1] for _ in range(300)} == {0, 7, 15}
    observed = []
    lengths.learned.observe = lambda *given: observed.append(given[0])
    for drafted in (15, 7, 0):
        lengths.step_ended(*step([drafted], drafted))
    assert observed == [3, 1, 0]


@pytest.mark.parametrize(
    ("given", "observed"),
    [
        *((step(d, n), [(n, d)]) for d, n in (([3, 3], 3), ([2, 3], 3), ([1, 1], 1), ([0, 0], 0))),
        (step([3, 0], 3), []),  # one request has just begun to draft
        (step([3, 3], 0), []),  # the last drafts of a trial
        (step([0, 0], 3), []),  # the first step of a trial
        (step([3, 3], 1), []),  # between two lengths
        (step([0, 0], 0, extra=4), []),
        (step([3, 3], 3, new=["a prompt"]), []),
        (step([], 0), []),
    ],
)
def test_steps_of_decodes_count_and_others_do_not(lengths, given, observed):
    found = []
    lengths.learned.observe = lambda length, accepted, _: found.append((length, accepted.tolist()))
    lengths.step_ended(*given)
    assert found == observed


@pytest.mark.parametrize("slots", [2, 3, 32, 64, 65, 256])
@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("tokens", [15, 160, 8192])
def test_vllm_captures_the_target_for_all_lengths(as_on_gpus, slots, limit, tokens):
    """Those of the table within its largest batch."""
    levels = [{"model": "a", "num_tokens": 3}, {"model": "b"}]
    keys = {"num_speculative_tokens": 8, "adaptive": True, "disable_by_batch_size": limit}
    config = object.__new__(CascadeSpeculativeConfig)
    config.hsd, config.num_speculative_tokens = CascadeConfig.parse({"levels": levels, **keys}), 8
    scheduler_config = SimpleNamespace(
        max_num_seqs=slots, max_num_batched_tokens=tokens, async_scheduling=True
    )
    config.adapt(scheduler_config)
    # No more than torch.compile covers the tokens of; a request feeds five at once.
    most = min(limit or MAX_BATCH_SIZE, tokens // 5)
    table = config.num_speculative_tokens_per_batch_size
    dense = build_dynamic_sd_schedule_lookup(table, slots, 8)
    given = [8, 4, 2][: max(min(slots - 1, most), 1)]
    assert set(dense[1:]) == {0, *given}
    scheduler = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=config, scheduler_config=scheduler_config),
        dynamic_sd_lookup=dense,
    )
    learn_lengths(scheduler, config)
    learned = scheduler.dynamic_sd_lookup
    assert learned.learned.lengths == [0, *sorted(given)]
    for size in range(1, slots + 1):
        assert (max(learned[size] for _ in range(9)) > 0) == (size <= most)
