"""What engines are compared with, and how they draft; kernels as in tests/kernels/conftest.py."""

import pytest
import torch
from support import triton_cpu
from support.engines import GREEDY, PROMPTS, SEEDED_JOBS, ids, run_engine
from transformers import AutoModelForCausalLM

triton_cpu.prepare_vllm()
triton_cpu.check_programs()


@pytest.fixture(params=["recursion", "fixed schedule"])
def proposals(request) -> None:
    """How engines draft on a CPU, and how they do on GPUs."""
    if request.param == "fixed schedule":
        request.getfixturevalue("as_on_gpus")


@pytest.fixture(scope="session")
def greedy_tokens(family) -> list[list[int]]:
    """The target's greedy tokens after `engines.PROMPTS`, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(family.target, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    count = GREEDY["max_tokens"]
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[
            0, -count:
        ].tolist()
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="session")
def seeded_tokens(family) -> dict[str, list[list[int]]]:
    """What plain vLLM samples in `engines.SEEDED_JOBS`."""
    engine = {"model": family.target, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    texts = {job: ids(result) for job, result in run_engine(engine, SEEDED_JOBS).items()}
    assert texts["together"] == texts["joining"]
    return texts
