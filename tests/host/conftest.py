"""Tests of engines run kernels that are compiled for a CPU: see tests/kernels/conftest.py."""

import warnings

import pytest
from support import triton_cpu
from support.v2_engines import AS_ON_GPUS

triton_cpu.install()
triton_cpu.check_programs()
if triton_cpu.INTERPRETED:
    warnings.filterwarnings("ignore", category=RuntimeWarning)


def pytest_runtest_setup(item: pytest.Item) -> None:
    triton_cpu.skip_what_cannot_run(item)


@pytest.fixture
def as_on_gpus(monkeypatch) -> None:
    """Engines draft by fixed schedules, of which the host reads nothing."""
    monkeypatch.setenv(AS_ON_GPUS, "1")
    monkeypatch.setattr("vllm_hsd.config.platform.read_on_host", lambda: False)


@pytest.fixture(params=["recursion", "fixed schedule"])
def proposals(request) -> None:
    """How engines draft on a CPU, and how they do on GPUs."""
    if request.param == "fixed schedule":
        request.getfixturevalue("as_on_gpus")


@pytest.fixture(scope="session")
def greedy_tokens(family) -> list[list[int]]:
    """The target's greedy tokens after `v2_engines.PROMPTS`, by transformers."""
    import torch
    from support.v2_engines import GREEDY, PROMPTS
    from transformers import AutoModelForCausalLM

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
    """What plain vLLM samples in the jobs of `v2_engines.run_seeded`."""
    from support.v2_engines import run_seeded

    texts, _ = run_seeded(family.target)
    assert texts["together"] == texts["joining"]
    return texts
