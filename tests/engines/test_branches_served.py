"""Branches with what requests and engines may ask for: texts are those of no speculation."""

import random

import numpy as np
import pytest
from engines.test_branches import texts
from support import hosted_branches
from support.adapters import write_adapter
from support.engines import differing, ids, run_engine, started
from support.hosted_branches import Oracle
from support.level_files import cascade
from support.marks import slow

from vllm_hsd.cascade.text_store import collect_texts, write_store
from vllm_hsd.tools import system

BASE = {"block_size": 32, "max_model_len": 512}
PROMPTS = [random.Random(i).choices(range(3, 62), k=4 + 9 * i) for i in range(9)]
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
# Attention has room for three rows of each request.
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "max_num_seqs": 27}
SAMPLED = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.9}
LETTERS = {"temperature": 0, "max_tokens": 40, "allowed_token_ids": list(range(67, 100))}
# Requests with seeds are coupled: their texts are those without speculation, too.
TEXTS = {
    "stop strings": {"prompts": PROMPTS, "params": {**GREEDY, "stop": list("abcdefgh")}},
    "several": {
        "prompts": PROMPTS[:3],
        "params": [
            {**SAMPLED, "n": 3, "seed": 1, "min_p": 0.1},
            {**SAMPLED, "n": 2, "seed": 2, "top_p": 0.8},
            {**SAMPLED, "n": 2, "seed": 3, "top_k": 9},
        ],
    },
    # What vLLM's kernels do to logits goes by one chain.
    "one row each": {
        "prompts": PROMPTS[:7],
        "params": [
            {**LETTERS, "stop": ["ab", "c", "fe", "d"]},
            {**LETTERS, "stop": ["ab"]},
            {**LETTERS, "bad_words": ["a", "bc", "dd"]},
            {**LETTERS, "bad_words": ["b"]},
            {**SAMPLED, "n": 3, "seed": 1, "min_p": 0.1, "logprobs": 2},
            {**SAMPLED, "n": 2, "seed": 2, "top_p": 0.8, "logprobs": 0},
            {**SAMPLED, "n": 2, "seed": 3, "top_k": 9, "presence_penalty": 0.5},
        ],
    },
}


def compare(model: str, arguments: dict, jobs: dict, vocabulary: int = 64) -> dict:
    """Results with branches that follow known texts for a while; asserts that they are equal."""
    arguments = {"model": model, **BASE, **arguments}
    plain = run_engine(arguments, jobs)
    lookups = [{"ngram": {"max": 3}}, {"ngram": {"max": 1}}]
    levels = cascade({"sources": lookups, "branches": 3})
    with started({**arguments, **levels}) as process:
        oracle = Oracle(texts(jobs, plain), vocabulary, seed=1)
        results, seen = process.call(hosted_branches.run, oracle, jobs)
    assert differing(results, plain) == []
    assert seen["won"] > 30
    return results


def test_adapters_of_the_target(family, tmp_path):
    first, second = (write_adapter(tmp_path / str(i), family.target, seed=i) for i in (1, 2))
    adapters = [None, first, second] * 3
    job = {"prompts": PROMPTS, "params": GREEDY, "adapters": adapters}
    jobs = {"mixed": job, "others": {**job, "adapters": adapters[1:] + adapters[:1]}}
    results = compare(family.target, LORA, jobs)
    mixed, others = (results[name]["outputs"] for name in jobs)
    assert all(a != b for a, b in zip(mixed, others, strict=True))


@pytest.mark.skipif(
    system.flags().isdisjoint({"avx512f", "amx_tile"}), reason="vLLM has no such caches on this CPU"
)
@pytest.mark.parametrize("dtype", ["fp8_e4m3", *slow("fp8_e5m2")])
def test_caches_of_eight_bits(family, dtype):
    compare(
        family.target, {"kv_cache_dtype": dtype}, {"text": {"prompts": PROMPTS, "params": GREEDY}}
    )


def test_stop_strings_bad_words_filters_and_several_sequences(text_family):
    compare(text_family.target, {"skip_tokenizer_init": False}, TEXTS, vocabulary=100)


@pytest.mark.slow
def test_tensor_parallel_ranks(family, tmp_path):
    """Each rank copies blocks of its own heads; the drafts are those of lookups."""
    jobs = {"text": {"prompts": PROMPTS, "params": GREEDY}}
    plain = run_engine({"model": family.target, **BASE}, jobs)["text"]
    written = zip(PROMPTS, ids(plain), strict=True)
    store = str(tmp_path / "store.safetensors")
    write_store(collect_texts([np.array(prompt + text) for prompt, text in written], 64), store)
    sources = [{"ngram": {"max": 1}}, {"suffix": {"store": store, "min_acceptance": 0.01}}]
    arguments = {"tensor_parallel_size": 2, "max_num_seqs": 36}
    levels = cascade({"sources": sources, "branches": 4})
    engine = {"model": family.target, **BASE, **arguments, **levels}
    result = run_engine(engine, jobs, env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})["text"]
    assert result["outputs"] == plain["outputs"]
    counters = result["counters"]
    listed = counters["spec_decode_num_draft_tokens"] / counters["spec_decode_num_drafts"]
    # Lists of more tokens than a chain has.
    assert listed > 5 and counters["spec_decode_num_accepted_tokens"] > 100
