"""The kernels on a GPU: tokens of the reference, no host sync, replay from a CUDA graph."""

import pytest
import torch
from support.kernel_batches import draft_lse, make_chains, make_trees

from vllm_hsd.kernels import chain_verify
from vllm_hsd.kernels.sample_row import sample_row
from vllm_hsd.kernels.testing import reference
from vllm_hsd.kernels.tree_verify import verify_tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.compiled,
]


def on_gpu(batch):
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


@pytest.mark.parametrize("rows", ["rows", "lse", "one-hot"])
@pytest.mark.parametrize("method", chain_verify.METHODS)
def test_tokens_of_the_reference(method, rows):
    batch = make_chains(32000, [5, 0, 3, 4] * 16, torch.bfloat16, one_hot=rows == "one-hot")
    lse = draft_lse(batch).cuda() if rows == "lse" else None
    result = chain_verify.verify_chain(**on_gpu(batch), method=method, draft_lse=lse)
    expected = reference.verify_chain(**batch, method=method)
    # A uniform within rounding distance of a boundary may fall on its other side.
    assert (result.token_ids.cpu() != expected.token_ids).any(1).sum() <= 1


def test_graph_replay_without_a_sync():
    batch = on_gpu(make_chains(5000, [4] * 32))
    chain_verify.verify_chain(**batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain_verify.verify_chain(**batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            batch["draws"] += 4
            graph.replay()
            direct = chain_verify.verify_chain(**batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert captured.token_ids.equal(direct.token_ids)


def test_sampled_rows():
    logits = torch.randn(64, 32000).mul(3).bfloat16()
    temperature = torch.full((64,), 0.7)
    seeds, draws = torch.arange(64), torch.arange(64)
    token, lse = sample_row(*(x.cuda() for x in (logits, temperature, seeds, draws)))
    expected, expected_lse = reference.sample_row(logits, temperature, seeds, draws)
    assert (token.cpu() != expected).sum() <= 1
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_trees():
    for kind in ("iid", "without replacement", "one-hot"):
        batch = make_trees(16, 32000, kind)
        result = verify_tree(**on_gpu(batch), replacement=kind == "iid")
        expected = reference.verify_tree(**batch, replacement=kind == "iid")
        assert (result.token_ids.cpu() != expected.token_ids).any(1).sum() <= 1
