"""What one request asks for never changes another request of its batch."""

import pytest
from support import neighbours
from support.cascades import stock
from support.engines import differing, run_engine
from support.level_files import cascade
from support.marks import slow

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
JOBS, CROWDED_JOBS = neighbours.jobs(), neighbours.crowded_jobs()
ENGINE = {**neighbours.ENGINE, **neighbours.reasoning()}


@pytest.fixture(scope="module")
def plain() -> dict:
    """With room for all: vLLM ends a preempted request's thinking twice."""
    jobs = neighbours.without_lists(JOBS | CROWDED_JOBS)
    return neighbours.without_listed(run_engine(ENGINE, jobs), jobs)


@pytest.mark.parametrize(
    "name", ["lookup", "branches", *slow("adaptive", "two models", "stock drafter")]
)
def test_texts_are_those_of_no_speculation(plain, name):
    """With room and, of another engine, crowded."""
    engine = {**ENGINE, **CONFIGURATIONS[name]}
    found = run_engine(engine, JOBS) | run_engine({**engine, **CROWDED}, CROWDED_JOBS)
    found = neighbours.without_listed(found, JOBS | CROWDED_JOBS)
    drafted = sum(result["counters"]["spec_decode_num_draft_tokens"] for result in found.values())
    preempted = sum(result["counters"]["num_preemptions"] for result in found.values())
    # With a second model's slots vLLM admits fewer requests at once than the blocks would hold.
    assert drafted > (100 if name == "adaptive" else 1000)
    assert preempted >= (0 if name == "two models" else 5)
    assert differing(found, plain) == []
