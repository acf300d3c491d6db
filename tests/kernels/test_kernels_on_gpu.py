"""The kernels on a GPU: tokens of the reference, no host sync, replay from a CUDA graph."""

import numpy as np
import pytest
import torch
from support import marks
from support.kernel_batches import draft_lse, make_chains, make_trees, verify_flat
from support.marks import DEVICE, TOY, needs_graphs
from support.proposal_states import (
    MAX_MODEL_LEN,
    TableLevel,
    block_tables,
    runner_tensors,
    schedule_of,
    state_of,
)
from support.suffix_requests import Requests, markov, store_of

from vllm_hsd.cascade import cascade_steps
from vllm_hsd.cascade.level import Level
from vllm_hsd.cascade.program import Program
from vllm_hsd.kernels import chain_verify
from vllm_hsd.kernels import naive as reference
from vllm_hsd.kernels.sample_row import sample_row
from vllm_hsd.kernels.tree_verify import verify_tree

pytestmark = marks.on_gpu
VOCABULARY = 2000 if TOY else 32000


def on_device(batch):
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


@pytest.mark.parametrize("rows", ["rows", "lse", "one-hot"])
@pytest.mark.parametrize("method", chain_verify.METHODS)
def test_tokens_of_the_reference(method, rows):
    batch = make_chains(VOCABULARY, [5, 0, 3, 4] * 16, torch.bfloat16, one_hot=rows == "one-hot")
    lse = draft_lse(batch).to(DEVICE) if rows == "lse" else None
    result = verify_flat(**on_device(batch), method=method, draft_lse=lse)
    expected = reference.verify_chain(**batch, method=method)
    # A uniform within rounding distance of a boundary may fall on its other side.
    assert (result.token_ids.cpu() != expected.token_ids).any(1).sum() <= 1


def test_sampled_rows():
    logits = torch.randn(64, VOCABULARY).mul(3).bfloat16()
    temperature = torch.full((64,), 0.7)
    seeds, draws = torch.arange(64), torch.arange(64)
    token, lse = sample_row(*(x.to(DEVICE) for x in (logits, temperature, seeds, draws)))
    expected, expected_lse = reference.sample_row(logits, temperature, seeds, draws)
    assert (token.cpu() != expected).sum() <= 1
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_suffix_lookup(seed):
    """Every count and confidence of the plain rule, over long texts and a store."""
    rng = np.random.default_rng(seed)
    texts = [(markov(rng, n, 30), rng.integers(0, 30, d)) for n, d in ((5, 0), (900, 2), (5000, 0))]
    store = store_of(*(markov(rng, 3000, 30) for _ in range(20)))
    for min_acceptance in (0.0, 0.05):
        assert any(Requests(texts, [16, 16, 9], 16, DEVICE).compare(store, min_acceptance))


def test_trees():
    batch = make_trees(16, VOCABULARY)
    result = verify_tree(**on_device(batch))
    expected = reference.verify_tree(**batch)
    assert (result.token_ids.cpu() != expected.token_ids).any(1).sum() <= 1


@needs_graphs
def test_a_replayed_proposal_equals_the_eager_one():
    """Graph and eager run of one program, staged from the same texts; the CPU's states for both."""
    vocab_size, device = 5000, torch.device("cuda")
    schedule = schedule_of(3, 8)
    groups, _tables = block_tables(0, device=device)  # addresses of these
    tables = [torch.randn(vocab_size, vocab_size).bfloat16().cuda() for _ in range(2)]
    levels = [Level(TableLevel(table)) for table in tables]
    program = Program(schedule, levels, groups, MAX_MODEL_LEN)
    kind = {"groups": 2, "device": device}
    states = [state_of(schedule, 6, vocab_size, torch.bfloat16, **kind) for _ in range(2)]

    def stage(seed):
        runner = on_device(runner_tensors(seed, 5, schedule.window))
        for state in states:
            cascade_steps.stage(state, schedule, **runner, scales=torch.ones(2, device=device))

    stage(0)
    for state in states:
        program.run(state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        program.run(states[0])
    drafted = 0
    for seed in range(100):
        stage(seed)
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
            program.run(states[1])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert states[0].draft_tokens.equal(states[1].draft_tokens)
        assert states[0].draft_length.equal(states[1].draft_length)
        drafted += int(states[0].draft_length.sum())
    assert drafted > 0
