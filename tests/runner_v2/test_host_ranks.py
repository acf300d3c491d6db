"""`adaptive` on a CPU with tensor parallelism: clocks differ by rank, and all must draft alike."""

import pytest
from runner_v1.test_adaptive_ranks import JOBS
from support import clocks, engines
from support.v2_engines import run_engine

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("kind", ["lookup", "levels"])
def test_ranks_whose_clocks_disagree_draft_alike(kind, family, tmp_path):
    lookup = {"ngram": {"max": 3}}
    levels = {"lookup": [lookup], "levels": [{**lookup, "num_tokens": 3}, {"model": family.small}]}
    speculative = {"method": "hsd", "num_speculative_tokens": 4, "levels": levels[kind]}
    plain = engines.run_engine({"model": family.target}, {"greedy": JOBS["greedy"]})
    results = run_engine(
        {
            "model": family.target,
            "tensor_parallel_size": 2,
            "worker_extension_cls": "support.clocks.Worker",
            "speculative_config": {**speculative, "adaptive": True},
        },
        JOBS,
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1", clocks.DIRECTORY: str(tmp_path)},
    )
    assert results["greedy"]["outputs"] == plain["greedy"]["outputs"]
    first, second = clocks.read(tmp_path, "agreed")
    assert first == second and len(first) > 20
    # Otherwise nothing has been tested.
    first, second = clocks.read(tmp_path, "own")
    assert sum(a != b for a, b in zip(first, second, strict=True)) > 5
