"""On the V2 runner too, what one request asks for never changes another request of its batch."""

import pytest
from support import neighbours, v2_engines
from support.engines import differing
from support.marks import slow

pytestmark = pytest.mark.triton
NGRAM = {"ngram": {"max": 4}}
LIBRARY = {"bigram": str(neighbours.MODELS / "library.safetensors")}
CROWDED = {"block_size": 32, "num_gpu_blocks_override": 13}
CONFIGURATIONS = {
    "lookup": {"method": "hsd", "num_speculative_tokens": 8, "levels": [NGRAM]},
    "branches": {
        "method": "hsd",
        "num_speculative_tokens": 4,
        "levels": [{"sources": [NGRAM, LIBRARY], "branches": 2}],
    },
    "two models": {
        "method": "hsd",
        "num_speculative_tokens": 6,
        "levels": [{**NGRAM, "num_tokens": 3}, {"model": str(neighbours.MODELS / "mid")}],
    },
    "stock drafter": {
        "method": "draft_model",
        "model": str(neighbours.MODELS / "mid"),
        "num_speculative_tokens": 4,
        "rejection_sample_method": "hierarchical",
    },
}


def served(jobs: dict) -> dict:
    """Without grammars, which are refused where vLLM schedules synchronously, as on a CPU."""
    return {name: job for name, job in jobs.items() if "grammar" not in name}


ENGINE = {**neighbours.ENGINE, **neighbours.reasoning()}
JOBS, CROWDED_JOBS = served(neighbours.jobs()), served(neighbours.crowded_jobs())


def answers(speculative_config: dict) -> dict:
    """Results of all jobs, with room and, of another engine, crowded."""
    engine = {**ENGINE, "speculative_config": speculative_config}
    found = v2_engines.run_engine(engine, JOBS)
    return found | v2_engines.run_engine({**engine, **CROWDED}, CROWDED_JOBS)


@pytest.fixture(scope="module")
def plain() -> dict:
    return v2_engines.run_engine(ENGINE, JOBS | CROWDED_JOBS)


@pytest.mark.parametrize("name", ["lookup", *slow("branches", "two models", "stock drafter")])
def test_texts_are_those_of_no_speculation(plain, name):
    found = answers(CONFIGURATIONS[name])
    drafted = sum(result["counters"]["spec_decode_num_draft_tokens"] for result in found.values())
    preempted = sum(result["counters"]["num_preemptions"] for result in found.values())
    assert drafted > 1000 and preempted >= (5 if name in ("lookup", "branches") else 0)
    assert differing(found, plain) == []
