"""Several drawn drafts of one model in one pass: texts and distributions as without drafts."""

import functools
import random

import pytest
import torch
from support import several_drafts
from support.eagle3_head import Reference, write_eagle3_head
from support.engines import differing, run_engine
from support.level_files import cascade
from support.sampling_cases import CASES, SIGNIFICANCE, p_values, sampling_job
from transformers import AutoModelForCausalLM

BASE = {"block_size": 32, "max_model_len": 256}
PROMPTS = [random.Random(i).choices(range(2, 62), k=4 + 9 * i) for i in range(9)]
TEXT = {"max_tokens": 40, "ignore_eos": True}
MIXED = [{**TEXT, "temperature": i % 2, "seed": 7 if i % 3 == 2 else None} for i in range(9)]
JOBS = {
    "greedy": {"prompts": PROMPTS, "params": {**TEXT, "temperature": 0, "logprobs": 1}},
    "greedy alone": {"prompts": PROMPTS[4:5], "params": {**TEXT, "temperature": 0}},
    # The drafts follow such masks, too.
    "greedy with masks": {
        "prompts": PROMPTS[3:5],
        "params": [
            {**TEXT, "temperature": 0, "logit_bias": {9: 4.0}},
            {**TEXT, "temperature": 0, "allowed_token_ids": [7, 8, 9, 20]},
        ],
    },
    "mixed": {"prompts": PROMPTS, "params": MIXED},
}
# Requests whose text depends on drafts.
RANDOM = {("mixed", i) for i, each in enumerate(MIXED) if each["temperature"] and not each["seed"]}
FOUR = {"num_speculative_tokens": 4}
TIGHT = {"max_num_batched_tokens": 80, "max_num_seqs": 9, "num_gpu_blocks_override": 28}


@pytest.fixture(scope="module")
def plain(family) -> dict:
    return run_engine({"model": family.target, **BASE}, JOBS)


@pytest.mark.parametrize(
    ("kind", "branches", "arguments"),
    [
        ("model", 3, {}),
        ("eagle3", 4, {}),
        # The scheduler cuts lists of drafts, cuts prompts, and preempts.
        ("model", 2, TIGHT),
        pytest.param(
            "model",
            11,
            {"max_model_len": 512, "max_num_seqs": 9},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_greedy_and_seeded_texts_stay(family, plain, tmp_path, kind, branches, arguments):
    value = family.mid
    if kind == "eagle3":
        value = write_eagle3_head(family.target, tmp_path, draft_vocabulary=60, trained=True)
    level = {kind: value, "branches": branches}
    results = run_engine(
        {"model": family.target, **BASE, **arguments, **cascade(level, **FOUR)}, JOBS
    )
    assert set(differing(results, plain)) <= RANDOM
    for name, result in results.items():
        level = result["levels"][0]
        assert level["branches"] > 10 and level["branches_followed"] > 0, name
        accepted = result["counters"]["spec_decode_num_accepted_tokens"]
        assert accepted == level["accepted"] + level["followed_tokens"]
    assert results["greedy"]["levels"][0]["branches_followed"] > 10
    if arguments is TIGHT:
        assert sum(result["counters"]["num_preemptions"] for result in results.values()) > 0


@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_every_row_is_what_the_level_says_after_its_first_token(family, tmp_path, kind):
    """Also after steps that another row won, or the text would only be accepted less."""
    if kind == "model":
        value = family.mid
        model = AutoModelForCausalLM.from_pretrained(value, dtype=torch.float32).eval()

        def said(text: list[int], row: list[int]) -> list[int]:
            logits = model(torch.tensor([[*text, *row]])).logits[0]
            return logits[len(text) - 1 : -1].argmax(-1).tolist()
    else:
        value = write_eagle3_head(family.target, tmp_path, draft_vocabulary=60, trained=True)
        said = Reference(family.target, value).guesses
    engine = {"model": family.target, **BASE, **cascade({kind: value, "branches": 3}, **FOUR)}
    found = run_engine(engine, {"greedy": JOBS["greedy"]}, work=several_drafts.recorded)
    some = [text for text in sorted(found) if found[text][0]][::5]
    assert len(some) > 20
    for text in some:
        chain, *others = found[text]
        assert said(list(text), chain) == chain
        assert len({row[0] for row in found[text] if row}) == sum(map(bool, found[text]))
        for row in filter(None, others):
            assert said(list(text), row)[1:] == row[1:]


@pytest.mark.parametrize(
    ("verifier", "count"),
    [
        ("block", 250),
        pytest.param("block", 15000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
        pytest.param("standard", 15000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
    ],
)
def test_samples_follow_the_target(small_vocabulary, verifier, count):
    level = {"model": small_vocabulary.small, "branches": 4}
    arguments = {"model": small_vocabulary.target, **BASE, **cascade(level, verifier=verifier)}
    result = run_engine(arguments, {"sampled": sampling_job(CASES, count)})["sampled"]
    found = p_values(small_vocabulary.target, CASES, result)
    assert min(found.values()) > SIGNIFICANCE, found
    assert result["levels"][0]["branches_followed"] > count


@pytest.mark.parametrize("fault", several_drafts.FAULTS)
def test_faults_are_caught(small_vocabulary, fault):
    """Negative controls, on 1000 samples of one case."""
    level = {"model": small_vocabulary.small, "branches": 4}
    arguments = {"model": small_vocabulary.target, **BASE, **cascade(level)}
    cases = {"temperature 1": CASES["temperature 1"]}
    work = functools.partial(several_drafts.run, fault=fault)
    result = run_engine(arguments, {"a": sampling_job(cases, 1000)}, work=work)["a"]
    found = p_values(small_vocabulary.target, cases, result)
    print(found)
    assert min(found.values()) < SIGNIFICANCE, found


def test_more_drafts_of_the_drafter_are_accepted_for_longer(family):
    """Tokens a step grow with the drafts, and traversal is ahead of token by token."""
    job = {"a": {"prompts": PROMPTS * 4, "params": {**TEXT, "max_tokens": 30}}}
    steps = {}
    for verifier, branches in (("block", 1), ("block", 4), ("standard", 4)):
        level = {"model": family.small, "branches": branches}
        arguments = {"model": family.target, **BASE, **cascade(level, verifier=verifier)}
        counters = run_engine(arguments, job)["a"]["counters"]
        steps[verifier, branches] = counters["spec_decode_num_drafts"]
    assert steps["block", 4] < steps["standard", 4] < steps["block", 1]


@pytest.mark.slow
def test_tensor_parallel_ranks_verify_alike(family, plain):
    """Each rank hosts rows and copies blocks of its own part of the caches."""
    level = {"model": family.mid, "branches": 3}
    tensor_parallel = {"tensor_parallel_size": 2, "max_num_seqs": 9}
    results = run_engine(
        {"model": family.target, **BASE, **tensor_parallel, **cascade(level)},
        JOBS,
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    assert set(differing(results, plain)) <= RANDOM
    assert results["greedy"]["levels"][0]["branches_followed"] > 10
