"""What one request asks for never changes another request of its batch."""

import functools
from collections.abc import Callable

import pytest
from support import neighbours
from support.cascades import stock
from support.engines import differing, run_engine
from support.level_files import cascade
from support.marks import slow_but
from vllm.config import ReasoningConfig

CROWDED = {"block_size": 32, "num_gpu_blocks_override": 13}
NGRAM, LOOKUP = {"ngram": {"max": 4}}, {"prompt_lookup_max": 4, "prompt_lookup_min": 1}
BIGRAM = {"bigram": str(neighbours.MODELS / "library.safetensors")}
MID = {"model": str(neighbours.MODELS / "mid")}
CONFIGURATIONS = {
    "lookup": cascade(NGRAM, num_speculative_tokens=8),
    "adaptive": cascade(NGRAM, num_speculative_tokens=8, adaptive=True),
    "branches": cascade({"sources": [NGRAM, BIGRAM]}, num_speculative_tokens=6),
    "two models": cascade({**NGRAM, "num_tokens": 4}, MID, num_speculative_tokens=7),
    "stock drafter": {"speculative_config": stock("ngram", num_speculative_tokens=8, **LOOKUP)},
}
JOBS = {
    "some": neighbours.jobs(neighbours.SOME, places=[4]),
    "all": neighbours.jobs(),
    # Greedy only, for an engine with so few cache blocks that it preempts.
    "crowded": {name: neighbours.job(neighbours.RARE[name], 1) for name in neighbours.SOME},
}
CASES = [(name, jobs) for name in CONFIGURATIONS for jobs in JOBS]
FAST = ("lookup", "some"), ("branches", "crowded")
ENGINE = {**neighbours.ENGINE, "reasoning_config": ReasoningConfig(**neighbours.REASONING)}


@pytest.fixture(scope="module")
def plain() -> Callable[[str], dict]:
    """With room for all: vLLM ends a preempted request's thinking twice."""

    @functools.cache
    def results(name: str) -> dict:
        jobs = neighbours.without_lists(JOBS[name])
        return neighbours.without_listed(run_engine(ENGINE, jobs), jobs)

    return results


@pytest.mark.parametrize(("name", "jobs"), slow_but(FAST, CASES))
def test_texts_are_those_of_no_speculation(plain, name, jobs):
    """With room, or crowded."""
    engine = {**ENGINE, **CONFIGURATIONS[name], **(CROWDED if jobs == "crowded" else {})}
    found = neighbours.without_listed(run_engine(engine, JOBS[jobs]), JOBS[jobs])
    drafted = sum(result["counters"]["spec_decode_num_draft_tokens"] for result in found.values())
    preempted = sum(result["counters"]["num_preemptions"] for result in found.values())
    # With a second model's slots vLLM admits fewer requests at once than the blocks would hold.
    assert drafted > (2 if name == "adaptive" else 18) * len(found)
    assert preempted >= (5 if jobs == "crowded" and name != "two models" else 0)
    assert differing(found, plain(jobs)) == []
