"""Several drawn drafts of a batch by the tree kernels, as the V1 runner verifies them on a GPU."""

import numpy as np
import pytest
import torch
from support import several_drafts
from support.engines import started
from support.level_files import cascade
from support.sampling_cases import CASES, p_values, sampling_job

from vllm_hsd.runner_v1.drawn_trees import verify_drawn_trees
from vllm_hsd.verify.branches import verify_rows
from vllm_hsd.verify.rng import host_uniforms

V, LENGTH, LEVEL = 6, 4, 1
# The interpreter is slow: a sound engine fails with this probability.
FEW_SAMPLES = 1e-4


def drawn_drafts(
    random: np.random.Generator, count: int
) -> tuple[list, torch.Tensor, torch.Tensor]:
    """Rows of a request, the target's probabilities of all of them, and the drafts'.

    Both depend on nothing but the last token, as a model's depend on the text: rows that begin
    alike have equal ones there.
    """
    target, draft = (torch.from_numpy(random.dirichlet(np.ones(V), V + 1)).float() for _ in "td")
    rows, at_target, at_draft = [], [], []
    for _ in range(count):
        last, row = V, []
        at_target.append(last)
        for _ in range(int(random.integers(0 if rows else 1, LENGTH + 1))):
            at_draft.append(last)
            weights = draft[last].double().numpy()
            last = int(random.choice(V, p=weights / weights.sum()))
            row.append(last)
            at_target.append(last)
        rows.append(row)
    return rows, target[at_target], draft[at_draft]


def in_one_call(requests: list, seeds: np.ndarray, draws: np.ndarray) -> list:
    rows, target, draft = zip(*requests, strict=True)
    return verify_drawn_trees(
        torch.cat(target), torch.cat(draft), rows, 4 * LENGTH, seeds, draws, LEVEL
    )


@pytest.mark.triton
def test_as_one_request_after_the_other():
    random = np.random.default_rng(7)
    requests = [drawn_drafts(random, 1 + i % 4) for i in range(80)]
    seeds, draws = random.integers(0, 1 << 40, 80), random.integers(0, 1000, 80)
    found = in_one_call(requests, seeds, draws)
    for (rows, target, draft), seed, first, own in zip(requests, seeds, draws, found, strict=True):
        numbers = first + np.arange(sum(map(len, rows)) + 1)
        # Kernels take the first one for the next token, the host the last one.
        uniforms = np.roll(host_uniforms(seed, np.array(LEVEL), numbers), -1)
        wanted = verify_rows(target, draft, rows, "block", torch.from_numpy(uniforms))
        assert own == wanted
    assert sum(own.winner > 0 for own in found) > 5
    assert sum(own.of_chain < own.accepted for own in found) > 5


@pytest.mark.triton
def test_a_row_without_a_distribution_ends_its_branch():
    rows, target, draft = [[1, 2], [3]], torch.full((5, V), 1 / V), torch.full((3, V), 1 / V)
    target[1] = float("nan")
    seeds = np.arange(40)
    for own in in_one_call([(rows, target, draft)] * 40, seeds, np.zeros(40, dtype=np.int64)):
        assert own.accepted <= 1 and (own.token_ids or own.winner == 0)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.triton
def test_samples_of_a_v1_engine_follow_the_target(small_vocabulary):
    level = {"model": small_vocabulary.small, "branches": 3}
    engine = {"model": small_vocabulary.target, "block_size": 32, **cascade(level)}
    cases = {"temperature 1": CASES["temperature 1"]}
    job = {"sampled": sampling_job(cases, 800)}
    with started(engine) as process:
        results = process.call(several_drafts.run, job, by_kernels=True)
        found = p_values(small_vocabulary.target, cases, results["sampled"])
        assert min(found.values()) > FEW_SAMPLES, found
        assert results["sampled"]["levels"][0]["branches_followed"] > 100
        results = process.call(several_drafts.run, job, several_drafts.FAULTS[0], True)
        found = p_values(small_vocabulary.target, cases, results["sampled"])
        assert min(found.values()) < FEW_SAMPLES, found
