"""Targets with multi-dimensional positions (M-RoPE), as Qwen's vision models have them."""

import pytest
from support.engines import configuration_errors, ids, run_engine
from support.level_files import cascade
from support.mrope_target import write_mrope_models

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(4 + 9 * i)] for i in range(4)]
REQUEST = {"max_tokens": 30, "ignore_eos": True, "seed": 3}
PARAMS = [{**REQUEST, "temperature": t} for t in (0, 0, 0.7, 1)]
# Prompts are computed in parts (seeded ones cannot without speculation in vLLM 0.32), and four
# requests need more blocks than there are.
CROWDED = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "num_gpu_blocks_override": 7}
KNOWN = "support.mrope_target:register"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[str, str]:
    return write_mrope_models(tmp_path_factory.mktemp("mrope"))


def run(model: str, *levels: dict, patch: str = KNOWN) -> tuple[list, list]:
    engine = {"model": model, "max_model_len": 96, "block_size": 32}
    if levels:
        engine |= CROWDED | cascade(*levels)
    jobs = {"text": {"prompts": PROMPTS, "params": PARAMS}}
    result = run_engine(engine, jobs, patch=patch)["text"]
    return ids(result), result["levels"]


@pytest.fixture(scope="module")
def plain(models) -> list:
    return run(models[0])[0]


def test_texts_are_those_of_no_speculation(models, plain):
    texts, levels = run(models[0], {"ngram": {"max": 3}, "num_tokens": 3}, {"model": models[1]})
    assert texts == plain
    assert all(level["accepted"] > 0 for level in levels)


def test_draft_tokens_at_the_wrong_positions_are_caught(models, plain):
    texts, _ = run(models[0], {"ngram": {"max": 3}}, patch=f"{KNOWN}+forget_offsets")
    assert texts != plain


def test_what_needs_the_targets_positions_is_refused(models):
    branches = {"sources": [{"ngram": {"max": 3}}, {"suffix": {}}], "branches": 4}
    engines = [{"model": models[0], **cascade(level)} for level in ({"early_exit": 1}, branches)]
    exit_, rows = configuration_errors(engines, patch=KNOWN)
    assert exit_ and "levels[0].early_exit needs the multi-dimensional positions" in exit_
    assert rows and "levels[0].branches needs the multi-dimensional positions" in rows
