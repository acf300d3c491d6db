"""Branches on a CPU: lists that end with the last branch, cut by `adaptive` to what pays."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.cascades import cascade
from support.engines import JOBS, SEEDED_JOBS, ids, run_engine

from vllm_hsd.budget.goodput import FORBIDDEN
from vllm_hsd.host.host_branches import HostBranches

LOOKUPS = [{"ngram": {"min": 1, "max": 3}}, {"suffix": {"min_acceptance": 0.01}}]


@pytest.mark.parametrize("patch", [None, "install", "install_free_drafts"])
def test_text_is_that_of_no_speculation(patch, family, greedy_tokens, seeded_tokens):
    """Whether nothing is cut, everything pays or prices change all the time."""
    config = {**cascade([{"sources": LOOKUPS, "branches": 3}]), "adaptive": patch is not None}
    patch = patch and f"support.adversarial_depth:{patch}"
    engine = {"model": family.target, "speculative_config": config, "max_num_seqs": 12}
    engine |= {"max_num_batched_tokens": 256, "max_model_len": 512, "block_size": 32}
    found = run_engine(engine, {"greedy": JOBS["joining"], **SEEDED_JOBS}, patch=patch)
    assert ids(found["greedy"]) == greedy_tokens
    assert found["greedy"]["levels"][0]["drafted"] > 0
    assert {job: ids(found[job]) for job in SEEDED_JOBS} == seeded_tokens


def hosted(tokens: list, counts: list, expected: float) -> tuple[HostBranches, SimpleNamespace]:
    """Branches [1, R - 1, N] that one of two sources has offered."""
    branches = torch.tensor([tokens], dtype=torch.int32)
    length = branches.shape[2]
    offered = torch.zeros(2, 2, length, dtype=torch.int32)
    offered[:, 0] = branches[0, :2]
    lookup = SimpleNamespace(
        branches=branches,
        branch_counts=torch.tensor([counts], dtype=torch.int32),
        token_ids=offered,
        counts=torch.full((2, 2), length, dtype=torch.int32),
        expected=torch.full((2, 2, length), expected, dtype=torch.float64),
        own=torch.zeros(2, 2, 2, dtype=torch.float64),
        prior=torch.tensor([5.0], dtype=torch.float64),
    )
    found = HostBranches.__new__(HostBranches)
    found.lookup, found.room = lookup, branches.shape[1] + 1
    found.chained = np.zeros(1, dtype=bool)
    return found, SimpleNamespace(slot=torch.tensor([0]), batch=1)


@pytest.mark.parametrize(
    ("price", "kept"),
    [(0.0, [3, 2]), (0.45, [1, 1]), (0.3, [1, 1]), (0.2, [2, 2]), (FORBIDDEN, [0, 0])],
)
def test_tokens_that_do_not_pay_are_cut(price, kept):
    """Each token of .5 survives half as often as the one before; the chain has none here."""
    branches, state = hosted([[7, 8, 9], [5, 6, 4]], [3, 2], 0.5)
    drafts, chains = np.ones(1, dtype=bool), np.zeros((1, 3))
    verify = price * np.arange(20)
    found = branches.keep_what_pays(state, drafts, chains, verify)
    assert branches.lookup.branch_counts.tolist() == [kept] and found.tolist() == [sum(kept)]


def test_a_request_of_chains_alone_has_no_branches_to_price():
    branches, state = hosted([[7, 8, 9], [5, 6, 4]], [3, 2], 0.5)
    branches.chained[0] = True
    drafts, chains = np.ones(1, dtype=bool), np.zeros((1, 3))
    assert branches.keep_what_pays(state, drafts, chains, np.zeros(20)).tolist() == [0]
    assert not branches.lookup.branch_counts.any()
