"""The V2 runner's tests run interpreted: Triton and vLLM decide at import (see support.triton_cpu).

`TRITON_INTERPRET=1 pytest -m interpret tests/runner_v2`; `make test` runs that as its own step.
"""

import os
import warnings

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from support import triton_cpu

    triton_cpu.install()
    warnings.filterwarnings("ignore", category=RuntimeWarning)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("interpret") and not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1: pytest -m interpret tests/runner_v2")


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
