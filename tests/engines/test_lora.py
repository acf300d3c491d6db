"""Cascades under a target with LoRA adapters: two adapters and the base model in one batch."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.adapters import write_adapter
from support.eagle3_head import write_eagle3_head
from support.engines import run_engine
from support.level_files import cascade
from support.marks import slow

from vllm_hsd.host.replacements import make_lora_inputs

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(5 + 9 * i)] for i in range(9)]
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def jobs(family, tmp_path_factory) -> dict:
    directory = tmp_path_factory.mktemp("adapters")
    first, second = (write_adapter(directory / str(i), family.target, seed=i) for i in (1, 2))
    mixed = [None, first, second] * 3
    adapters = {"mixed": mixed, "others": mixed[1:] + mixed[:1], "base": None}
    job = {"prompts": PROMPTS, "params": GREEDY}
    return {name: {**job, "adapters": each} for name, each in adapters.items()}


# One slot more than adapters: on CPU, vLLM 0.32 gives requests without an adapter the last slot's
# when they share a batch with others (its torch operators index by -1).
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def plain(family, jobs) -> dict:
    results = run_engine({"model": family.target, **LORA}, jobs)
    texts = {name: result["outputs"] for name, result in results.items()}
    assert all(a != b for a, b in zip(texts["mixed"], texts["others"], strict=True))
    assert texts["mixed"][::3] == texts["base"][::3]
    return texts


def test_rows_of_a_prompts_last_chunk_with_drafts():
    """vLLM's scheduler may plan drafts next to the last token of a prompt, whose rest is cached."""
    states = SimpleNamespace(
        num_computed_prefill_tokens=np.array([0, 12, 20]),
        prefill_len=SimpleNamespace(np=np.array([30, 13, 20])),
    )
    requests = 7, 8, 9
    found, *_ = make_lora_inputs(
        lambda *_: (requests, (), ()), states, ["a", "b", "c"], np.arange(3), np.array([8, 5, 5])
    )
    assert found == (7, *[8] * 5, *[9] * 5)


@pytest.mark.parametrize("name", ["ngram > mid", "eagle3", *slow("ngram")])
def test_greedy_texts_equal_those_without_speculation(family, tmp_path, jobs, plain, name):
    ngram, mid = {"ngram": {"max": 3}}, {"model": family.mid}
    if name == "eagle3":
        # It has no embedding of its own, and shares the target's.
        write_eagle3_head(family.target, tmp_path, trained=True)
    levels = {
        "ngram": [ngram],
        "ngram > mid": [{**ngram, "num_tokens": 3}, mid],
        "eagle3": [{"eagle3": str(tmp_path)}],
    }[name]
    results = run_engine({"model": family.target, **cascade(*levels), **LORA}, jobs)
    for name, result in results.items():
        assert result["outputs"] == plain[name]
        assert result["counters"]["spec_decode_num_draft_tokens"] > 0
        assert result["counters"]["spec_decode_num_accepted_tokens"] > 0
