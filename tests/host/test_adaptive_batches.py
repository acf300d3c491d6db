"""What the scheduler's learned draft lengths take in, and what a CPU's is told of each draft."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.host.adaptive import LearnedLengths, learn_lengths
from vllm_hsd.host.draft_lengths import get_draft_tokens
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


@pytest.mark.parametrize(
    ("limit", "tokens", "most"), [(None, 8192, 64), (4, 8192, 4), (None, 160, 32), (None, 15, 3)]
)
def test_no_more_requests_draft_than_are_captured(as_on_gpus, limit, tokens, most):
    """As many as are configured, at most 64, of as many tokens as torch.compile covers."""
    levels = [{"model": "a", "num_tokens": 3}, {"model": "b"}]
    keys = {"num_speculative_tokens": 8, "adaptive": True, "disable_by_batch_size": limit}
    config = object.__new__(CascadeSpeculativeConfig)
    config.hsd, config.num_speculative_tokens = CascadeConfig.parse({"levels": levels, **keys}), 8
    given = {"max_num_seqs": 65, "max_num_batched_tokens": tokens, "async_scheduling": True}
    given |= {"max_num_scheduled_tokens": None, "long_prefill_token_threshold": 0}
    scheduler_config = SimpleNamespace(**given)
    config.adapt(scheduler_config)
    table = config.num_speculative_tokens_per_batch_size
    scheduler = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=config, scheduler_config=scheduler_config),
        dynamic_sd_lookup=build_dynamic_sd_schedule_lookup(table, 65, 8),
    )
    learn_lengths(scheduler, config)
    learned = scheduler.dynamic_sd_lookup
    assert learned.learned.lengths == [0, 2, 4, 8]
    drafting = [size for size in range(1, 66) if max(learned[size] for _ in range(9))]
    assert drafting == [*range(1, most + 1)]


@pytest.mark.parametrize(
    ("branches", "handed_over"),
    [
        (None, [[-1] * 3, [], []]),
        (SimpleNamespace(listed=np.array([0, 2])), [[-1] * 2, [], []]),
        (SimpleNamespace(listed=None), [[-1] * 4] * 3),
    ],
    ids=["drafts", "lists of trees, which end where the last branch does", "whole trees"],
)
def test_placeholders_are_cut_to_what_was_drafted(branches, handed_over):
    """Of three requests in slots 4, 0 and 2; the second has no draft."""
    rows = torch.tensor([-1, -1, 0, -1, 1], dtype=torch.int32)
    state = SimpleNamespace(row_of_slot=rows, draft_length=torch.tensor([0, 3]))
    runner = SimpleNamespace(
        speculator=SimpleNamespace(state=state, branches=branches),
        req_states=SimpleNamespace(req_id_to_index={"a": 4, "b": 0, "c": 2}),
    )
    drafts = SimpleNamespace(req_ids=["a", "b", "c"], draft_token_ids=[[-1] * 4 for _ in "abc"])
    assert get_draft_tokens(lambda: drafts, runner).draft_token_ids == handed_over
