"""Adaptive drafting with tensor parallelism: clocks differ by rank, so one rank decides for all."""

import pytest
from support import clocks
from support.cascades import head
from support.engines import run_engine
from support.level_files import cascade

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(5 + 9 * i)] for i in range(6)]
JOBS = {
    "greedy": {"prompts": PROMPTS, "params": {"temperature": 0, "max_tokens": 30}},
    "sampled": {"prompts": PROMPTS, "params": {"max_tokens": 30, "ignore_eos": True}},
}


def cascades(family) -> dict[str, list[dict]]:
    lookup = {"ngram": {"max": 3}}
    return {
        "head above a lookup": [{"sources": [lookup, {"eagle3": head(family)}]}],
        "lookup": [lookup],
        "levels": [{**lookup, "num_tokens": 3}, {"model": family.small}],
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head above a lookup", "lookup", "levels"])
def test_ranks_whose_clocks_disagree_draft_alike(kind, family, tmp_path):
    plain = run_engine({"model": family.target}, {"greedy": JOBS["greedy"]})
    engine = {"model": family.target, "worker_extension_cls": "support.clocks.Worker"}
    engine |= {"tensor_parallel_size": 2, **cascade(*cascades(family)[kind], adaptive=True)}
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", clocks.DIRECTORY: str(tmp_path)}
    results = run_engine(engine, JOBS, env=env)
    assert results["greedy"]["outputs"] == plain["greedy"]["outputs"]
    first, second = clocks.read(tmp_path, "agreed")
    assert first == second and len(first) > 20
    # Otherwise nothing has been tested.
    first, second = clocks.read(tmp_path, "own")
    assert sum(a != b for a, b in zip(first, second, strict=True)) > 5
