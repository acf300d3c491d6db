"""What engines are compared with, and how they draft; kernels as in tests/kernels/conftest.py."""

import pytest
from support import triton_cpu
from support.engines import FIXED_SCHEDULE, GREEDY, PROMPTS, PROPOSALS, SEEDED_JOBS, ids, run_engine
from support.tiny_models import greedy_text

triton_cpu.prepare_vllm()
triton_cpu.check_programs()


@pytest.fixture(params=PROPOSALS)
def proposals(request) -> None:
    """How engines draft on a CPU, and how they do on GPUs."""
    if request.param == FIXED_SCHEDULE:
        request.getfixturevalue("as_on_gpus")


@pytest.fixture(scope="session")
def greedy_tokens(family) -> list[list[int]]:
    """The target's greedy tokens after `engines.PROMPTS`, by transformers."""
    return greedy_text(family.target, PROMPTS, GREEDY["max_tokens"])


@pytest.fixture(scope="session")
def seeded_tokens(family) -> dict[str, list[list[int]]]:
    """What plain vLLM samples in `engines.SEEDED_JOBS`."""
    engine = {"model": family.target, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    texts = {job: ids(result) for job, result in run_engine(engine, SEEDED_JOBS).items()}
    assert texts["together"] == texts["joining"]
    return texts
