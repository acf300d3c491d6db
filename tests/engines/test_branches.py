"""Several drafts of a request in one pass: texts, caches and distributions as without them."""

import itertools
import random

import pytest
from support import engines, hosted_branches, level_files
from support.architectures import write_models
from support.engines import configuration_errors, differing, ids, run_engine, started
from support.hosted_branches import AsOffered, Avoiding, NoBranches, Oracle
from support.marks import slow
from support.sampling_cases import CASES, SIGNIFICANCE, p_values, sampling_job
from support.tiny_models import EOS

SIZE, LENGTH = 32, 5
BASE = {"block_size": SIZE, "max_model_len": 512}
PROMPTS = [random.Random(i).choices(range(2, 62), k=4 + 9 * i) for i in range(12)]
SHARED = [[(j * j + j // 7) % 60 + 2 for j in range(70)] + [i + 2, 3] for i in range(6)]
GREEDY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
STOPS = {"ignore_eos": False, "logit_bias": {EOS: 4.0}}
PROCESSED = [
    {**GREEDY, **PENALTIES},
    {**GREEDY, "bad_words_ids": [[5], [7, 9], [3, 3]]},
    {**GREEDY, **STOPS, "min_tokens": 16},
    {**GREEDY, **STOPS},
    {**GREEDY, "logprobs": 3, "presence_penalty": 0.5},
    {**GREEDY, "logprobs": 0},
]
JOBS = {
    "batch 1": {"prompts": PROMPTS[3:4], "params": GREEDY},
    "batch 12": {"prompts": PROMPTS, "params": GREEDY},
    "prefix hits": {"prompts": [*SHARED, *PROMPTS[-3:]], "params": {**GREEDY, "max_tokens": 30}},
    "joining": {
        "prompts": PROMPTS,
        "params": [{**GREEDY, "max_tokens": 10 + 4 * i} for i in range(12)],
        "arrive": [2 * (i // 3) for i in range(12)],
        "abort": {4: 9},
    },
    "max_model_len": {"prompts": SHARED[:2], "params": {**GREEDY, "max_tokens": 600}},
    "few tokens": {
        "prompts": PROMPTS[:6],
        "params": [{**GREEDY, "max_tokens": 1 + i} for i in range(6)],
    },
    # They have one row, next to requests with several.
    "processors": {
        "prompts": [*PROMPTS[:6], *PROMPTS[:3]],
        "params": [*PROCESSED, *[GREEDY] * 3],
    },
}
LOOKUPS = {"ngram": {"max": 3}}, {"ngram": {"max": 1}}


def cascade(*sources, branches: int | None, **keys) -> dict:
    level = {"sources": list(sources or LOOKUPS), **({"branches": branches} if branches else {})}
    return level_files.cascade(level, num_speculative_tokens=LENGTH, **keys)


def texts(jobs: dict, results: dict) -> list[list[int]]:
    """Prompts with each of their outputs, of all jobs, for an oracle."""
    return [
        prompt + sequence["ids"]
        for name, job in jobs.items()
        for prompt, output in zip(job["prompts"], results[name]["outputs"], strict=True)
        for sequence in output or []
    ]


@pytest.fixture(scope="module")
def plain(family) -> dict:
    return run_engine({"model": family.target, **BASE}, JOBS)


# The scheduler cuts lists of drafts, cuts prompts, and preempts.
CROWDED = {"max_num_batched_tokens": 50, "max_num_seqs": 12, "num_gpu_blocks_override": 36}
ENGINES = {
    "three drafts": (3, {}),
    "two drafts, few tokens and blocks": (2, CROWDED),
    # Blocks for two of four drafts.
    "by default, few tokens and blocks": (None, CROWDED),
    "four drafts": (4, {}),
}


def test_the_rule_grows_branches_and_greedy_texts_stay(family, plain):
    # On a busy machine nothing may pay.
    patch = "support.adversarial_depth:install_free_drafts"
    arguments = {"model": family.target, **BASE, **cascade(branches=3, adaptive=True)}
    with started(arguments, patch=patch) as process:
        results, seen = process.call(hosted_branches.run, AsOffered(), JOBS)
    assert differing(results, plain) == []
    assert seen["won"] > 0 and seen["rows"] > 1
    for name, result in results.items():
        accepted = result["counters"]["spec_decode_num_accepted_tokens"]
        assert accepted == result["levels"][0]["accepted"], name


@pytest.mark.parametrize("name", [*list(ENGINES)[:3], *slow("four drafts")])
def test_greedy_texts_and_caches_are_those_without_branches(family, plain, name):
    branches, arguments = ENGINES[name]
    oracle = Oracle(texts(JOBS, plain), 64, seed=1)
    few = cascade(branches=branches) | arguments
    with started({**BASE, "model": family.target, **few}) as process:
        results, seen = process.call(hosted_branches.run, oracle, JOBS)
        assert differing(results, plain) == []
        won = [key for key in seen if key.startswith("won at")]
        assert seen["won"] > 200 and len(won) > SIZE / 2 and seen["one row"] > 0
        assert seen["misnamed"] == 0
        counters = [result["counters"] for result in results.values()]
        if arguments:
            assert seen["rows"] == 2 and seen["lookahead"] == LENGTH + 2 * SIZE
            assert seen["cut"] > 0
            preempted = sum(each["num_preemptions"] for each in counters)
            assert preempted > 0 or branches is None
        else:
            assert results["prefix hits"]["counters"]["prefix_cache_hits"] > 0
        work = oracle, NoBranches(), PROMPTS[5], 120
        difference, won = process.call(hosted_branches.difference_of_caches, *work)
        assert difference == 0 and won > 3
        if arguments:
            return
        # Controls: each copy matters.
        job = {"batch 12": JOBS["batch 12"]}
        for fault in (
            "no copy of the text before a root",
            "no copy of what a branch computed",
        ):
            results, _ = process.call(hosted_branches.run, oracle, job, fault)
            assert len(differing(results, plain)) > 6, fault


@pytest.mark.parametrize(
    ("verifier", "count"),
    [
        ("block", 250),
        *(
            pytest.param(name, 15000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])
            for name in ("block", "standard", "coupled")
        ),
    ],
)
def test_samples_follow_the_target(small_vocabulary, verifier, count):
    arguments = cascade({"ngram": {"max": 2}}, branches=4, verifier=verifier)
    # Attention has room for all rows of 16 requests: a step has tokens for no more lists.
    arguments |= {"max_num_batched_tokens": 16 * 4 * (LENGTH + 1)}
    with started({**BASE, "model": small_vocabulary.target, **arguments}) as process:
        job = {"sampled": sampling_job(CASES, count)}
        results, seen = process.call(hosted_branches.run, Avoiding(5), job)
        found = p_values(small_vocabulary.target, CASES, results["sampled"])
        assert min(found.values()) > SIGNIFICANCE, found
        assert seen["won"] > count
        if verifier == "block":
            cases = {"temperature 1": CASES["temperature 1"]}
            job = {"sampled": sampling_job(cases, 2000)}
            fault = "tokens drawn one row off"
            results, _ = process.call(hosted_branches.run, Avoiding(5), job, fault)
            found = p_values(small_vocabulary.target, cases, results["sampled"])
            assert min(found.values()) < SIGNIFICANCE, found


def test_seeded_texts_are_those_of_plain_vllm(family, seeded_tokens):
    jobs = engines.SEEDED_JOBS
    drawn = zip(engines.PROMPTS * 2, itertools.chain(*seeded_tokens.values()), strict=True)
    oracle = Oracle([prompt + text for prompt, text in drawn], 64, seed=3)
    with started({**BASE, "model": family.target, **cascade(branches=3)}) as process:
        results, seen = process.call(hosted_branches.run, oracle, jobs)
    assert {name: ids(result) for name, result in results.items()} == seeded_tokens
    assert seen["won"] > 3


def test_layers_with_a_window_have_blocks_of_their_own(tmp_path):
    """Several KV-cache groups, which share the memory of their layers."""
    target, _ = write_models("Gemma2", tmp_path)
    jobs = {"text": {"prompts": PROMPTS[:6], "params": {**GREEDY, "max_tokens": 40}}}
    plain = run_engine({"model": target, **BASE}, jobs)
    with started({**BASE, "model": target, **cascade(branches=3)}) as process:
        oracle = Oracle(texts(jobs, plain), 64, seed=5)
        results, seen = process.call(hosted_branches.run, oracle, jobs)
    assert differing(results, plain) == []
    assert seen["won"] > 10 and seen["groups"] > 1


def test_a_request_with_a_grammar_has_one_row(text_family):
    prompts = [[random.Random(i).randrange(3, 200) for _ in range(6)] for i in range(4)]
    params = {
        "temperature": 0,
        "max_tokens": 24,
        "structured_outputs": {"regex": "(ab|cd|ef|gh){4,12}x"},
    }
    jobs = {"grammar": {"prompts": prompts, "params": params}}
    base = {"model": text_family.target, "skip_tokenizer_init": False}
    plain = run_engine({**base, **BASE}, jobs)
    oracle = Oracle(texts(jobs, plain), 200, seed=4)
    with started({**BASE, **base, **cascade(branches=3)}) as process:
        results, seen = process.call(hosted_branches.run, oracle, jobs)
    assert differing(results, plain) == []
    assert seen["won"] == 0 and seen["one row"] > 5
    # Most of it is forced by the grammar, and counted as such.
    assert results["grammar"]["counters"]["spec_decode_num_accepted_tokens"] > 5


def test_what_cannot_host_branches_is_refused(family):
    hsd = {"model": family.target, **cascade(branches=4)}
    few = {**hsd, "num_gpu_blocks_override": 30, "max_num_seqs": 8, "block_size": SIZE}
    with pytest.raises(RuntimeError, match=r"reserves 7 blocks .* max_num_seqs=8 .* has 30"):
        run_engine(few, {})
    short = {**hsd, "max_num_seqs": 8, "max_model_len": 192, "block_size": SIZE}
    with pytest.raises(RuntimeError, match=r"takes 224 tokens of max_model_len=192 with .* of 32"):
        run_engine(short, {})
    with pytest.raises(RuntimeError, match=r"max_num_seqs=2 in all"):
        run_engine({**hsd, "max_num_seqs": 2}, {})
    narrow = {**hsd, "max_num_batched_tokens": 23, "max_num_seqs": 8}
    # vLLM 0.33 says it before us.
    said = r"make 24 tokens .* max_num_batched_tokens=23|Got max_num_batched_tokens=23"
    with pytest.raises(RuntimeError, match=said):
        run_engine(narrow, {})
    connected = {**hsd, "kv_transfer_config": {"kv_connector": "X", "kv_role": "kv_both"}}
    assert "levels[0].branches" in configuration_errors([connected])[0]
