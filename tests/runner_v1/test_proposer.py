"""Selecting some of the hosted levels; `test_engine` does so in an engine."""

from types import SimpleNamespace

import pytest
import torch

from vllm_hsd.core.counters import Count
from vllm_hsd.core.levels import LevelOptions
from vllm_hsd.runner_v1.proposer import CascadeProposer


@pytest.fixture
def proposer():
    """One that hosts three levels and runs nothing."""
    bare = object.__new__(CascadeProposer)
    options = [LevelOptions(4, stopping="entropy"), LevelOptions(4), LevelOptions(8)]
    bare.hosted = [
        SimpleNamespace(level=SimpleNamespace(context_length=100), options=each) for each in options
    ]
    bare.device = torch.device("cpu")
    bare.cascade_config = SimpleNamespace(
        num_speculative_tokens=8,
        horizontal_tokens=0,
        adaptive=False,
        levels=[SimpleNamespace(fills_cache_lazily=False)] * 3,
    )
    bare.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(seed=0, get_vocab_size=lambda: 5),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    return bare


def test_selected_levels_keep_their_options_and_get_new_draft_lengths(proposer):
    proposer.select_levels([0, 2], [2, 6])
    assert proposer.cascade.levels == [proposer.hosted[0].level, proposer.hosted[2].level]
    assert proposer.cascade.options == [LevelOptions(2, stopping="entropy"), LevelOptions(6)]
    assert proposer.num_speculative_tokens == 6
    assert proposer.cascade.drafts[-1].probs.shape == (4 * 6, 5)
    proposer.cascade.counters.rows[1, Count.drafted] = 5
    assert proposer.take_counts().rows[:, Count.drafted].tolist() == [0, 0, 5]


@pytest.mark.parametrize(
    ("levels", "draft_lengths", "message"),
    [
        ([], [], "are not a cascade of the 3 hosted"),
        ([1, 1], [2, 4], "are not a cascade of the 3 hosted"),
        ([3], [4], "are not a cascade of the 3 hosted"),
        ([0, 1], [4], "do not give each of levels"),
        ([0, 1], [0, 4], "do not give each of levels"),
        ([0, 1], [4, 9], "end above num_speculative_tokens=8"),
    ],
)
def test_levels_and_draft_lengths_that_do_not_fit_are_refused(
    proposer, levels, draft_lengths, message
):
    with pytest.raises(ValueError, match=message):
        proposer.select_levels(levels, draft_lengths)
