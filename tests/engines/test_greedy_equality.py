"""At temperature 0 a cascade's output equals that of no speculation, token for token."""

import pytest
from support.engines import differing, ids, run_engine
from support.level_files import cascade

from vllm_hsd.tools.audit.tiny_models import EOS

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(5 + 12 * i)] for i in range(12)]
# Some tokens are left before max_model_len, 256.
FULL = [[(7 * i + j * j) % 60 + 2 for j in range(226 + 5 * i)] for i in range(3)]
LENGTH = 24
LONG = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}

ENDS, PENALTIES = {"ignore_eos": False}, {"presence_penalty": 0.5, "frequency_penalty": 0.2}
PROCESSORS: list[dict] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.8},
    {"frequency_penalty": 0.8},
    {"logit_bias": {5: 4.0, 9: -4.0}},
    {"allowed_token_ids": [3, 4, 5, 6, 7, 8]},
    {"min_tokens": 16, "logit_bias": {EOS: 6.0}, **ENDS},
    STOPS := {"stop_token_ids": list(range(2, 12)), **ENDS},
    EARLY := {"logit_bias": {EOS: 4.0}, **ENDS},
    {"repetition_penalty": 1.3, **PENALTIES, "min_tokens": 16, "logit_bias": {5: 3.0}, **ENDS},
]
# Every processor for four prompts, all of them in one batch.
PROCESSED = [(given, prompt) for given in PROCESSORS for prompt in PROMPTS[4:8]]

JOBS = {
    **{f"batch {n}": {"prompts": PROMPTS[-n:], "params": LONG} for n in (1, 12)},
    # Earlier jobs have put every full block of these prompts into the prefix cache.
    "prefix cache": {"prompts": PROMPTS, "params": {**LONG, "max_tokens": 12}},
    "max_model_len": {"prompts": FULL, "params": {**LONG, "max_tokens": 400}},
    "few tokens": {
        "prompts": PROMPTS,
        "params": [{**LONG, "max_tokens": 1 + i % 4} for i in range(12)],
    },
    "joining": {
        "prompts": PROMPTS,
        "params": [{**LONG, "max_tokens": 10 + 3 * i} for i in range(12)],
        "arrive": [2 * (i // 3) for i in range(12)],
    },
    "aborted": {
        "prompts": PROMPTS,
        "params": LONG,
        "arrive": [i % 5 for i in range(12)],
        "abort": {i: 4 + i for i in range(0, 12, 3)},
    },
    "greedy with sampled": {
        "prompts": PROMPTS,
        "params": [LONG if i % 2 else {**LONG, "temperature": 1, "seed": i} for i in range(12)],
    },
    "processors": {
        "prompts": [prompt for _, prompt in PROCESSED],
        "params": [{**LONG, **given} for given, _ in PROCESSED],
    },
    "logprobs": {
        "prompts": PROMPTS[:6],
        "params": [{**LONG, "logprobs": i, "presence_penalty": 0.5 * (i % 2)} for i in range(6)],
    },
}

SPECULATIVE = {
    "two drafters": lambda family: cascade(
        {"model": family.small, "num_tokens": 3}, {"model": family.mid}, num_speculative_tokens=8
    ),
    "chunked prefill": lambda family: {
        **cascade({"model": family.mid}, num_speculative_tokens=4),
        "max_num_batched_tokens": 24,
        "max_num_seqs": 16,
    },
    "three drafters in a tiny cache": lambda family: {
        **cascade(
            {"sources": [{"ngram": {}}, {"model": family.small}], "num_tokens": 2},
            {"model": family.mid, "num_tokens": 3, "max_rounds": 1},
            {"model": family.target},
            num_speculative_tokens=7,
            verifier="standard",
        ),
        "block_size": 32,
        "num_gpu_blocks_override": 24,
    },
}


@pytest.fixture(scope="module")
def plain(family):
    return run_engine({"model": family.target}, JOBS)


@pytest.fixture(scope="module", params=SPECULATIVE)
def speculated(family, request):
    engine = {"model": family.target, **SPECULATIVE[request.param](family)}
    return request.param, run_engine(engine, JOBS)


@pytest.mark.parametrize("job", [job for job in JOBS if job != "aborted"])
def test_same_tokens_as_without_speculation(plain, speculated, job):
    _, results = speculated
    wrong = differing({job: results[job]}, plain)
    assert [i for _, i in wrong if job != "greedy with sampled" or i % 2] == []


def test_aborted_requests_change_no_other_output(plain, speculated):
    _, results = speculated
    whole = ids(plain["batch 12"])
    got = [out[0]["ids"] if out else [] for out in results["aborted"]["outputs"]]
    assert any(0 < len(got[i]) < LENGTH for i in JOBS["aborted"]["abort"])
    for i in range(12):
        length = len(got[i]) if i in JOBS["aborted"]["abort"] else LENGTH
        assert got[i] == whole[i][:length], f"request {i}"


def test_jobs_reach_the_conditions_they_name(plain, speculated):
    name, results = speculated
    preemptions = sum(result["counters"]["num_preemptions"] for result in results.values())
    if name == "three drafters in a tiny cache":
        assert preemptions > 0
    else:
        assert results["prefix cache"]["counters"]["prefix_cache_hits"] > 0
        levels = results["batch 12"]["levels"]
        assert all(0.2 < level["accepted"] / level["drafted"] < 0.9 for level in levels)
    processed = list(zip(PROCESSED, plain["processors"]["outputs"], strict=True))
    assert any(out["stop"] for (given, _), [out] in processed if given is STOPS)
    assert any(len(out["ids"]) < LENGTH for (given, _), [out] in processed if given is EARLY)
    full = zip(FULL, ids(plain["max_model_len"]), strict=True)
    assert all(len(prompt) + len(text) == 256 for prompt, text in full)


def test_no_invalid_token_is_drafted(speculated):
    _, results = speculated
    levels = results["few tokens"]["levels"]
    # Requests of one or two tokens draft nothing, of three tokens one, of four at most two and one.
    assert levels[-1]["drafted"] <= 3 * 1 + 3 * 3
