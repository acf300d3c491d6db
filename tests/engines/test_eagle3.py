"""EAGLE-3 heads that draft right below the target, alone or next to lookups: vLLM's own drafter.

The reference recomputes head and target from the text alone (support/eagle3_head.py). Heads below
other levels: test_head_levels.py.
"""

import random

import pytest
from support import recorded_heads
from support.eagle3_head import Reference, write_eagle3_head
from support.engines import differing, run_engine, started
from support.level_files import cascade
from support.sampling_cases import CASES, SIGNIFICANCE, p_values, sampling_job

TOKENS = 4
GREEDY = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
PROMPTS = [random.Random(i).choices(range(5), k=4 + 12 * i) for i in range(9)]
# They share 64 tokens, two blocks of the cache.
SHARED = [[(j * j + j // 7) % 5 for j in range(64)] + [i % 5, i // 5, 3] for i in range(8)]

JOBS = {
    "batch 1": {"prompts": PROMPTS[-1:], "params": GREEDY},
    "batch 4": {"prompts": PROMPTS[:4], "params": GREEDY},
    "batch 9": {"prompts": PROMPTS, "params": GREEDY},
    # The first one alone, so that the others find its blocks.
    "first": {"prompts": SHARED[:1], "params": GREEDY},
    "prefix hits": {"prompts": SHARED, "params": GREEDY},
    "joining": {
        "prompts": PROMPTS,
        "params": [{**GREEDY, "max_tokens": 6 + 3 * i} for i in range(9)],
        "arrive": [2 * (i // 3) for i in range(9)],
        "abort": {5: 6},
    },
    # Requests of one step share the blocks of one prompt.
    "same prompt": {
        "prompts": [[(3 * j + j // 5) % 5 for j in range(70)]] * 3,
        "params": {**GREEDY, "max_tokens": 12},
    },
    "max_model_len": {"prompts": PROMPTS[::4], "params": {**GREEDY, "max_tokens": 400}},
    "with sampled": {
        "prompts": PROMPTS[:8],
        "params": [GREEDY if i % 2 else {**GREEDY, "temperature": 1, "seed": i} for i in range(8)],
    },
}

ENGINES = {
    "whole prompts": {},
    "chunked prefill, few blocks": {
        "max_num_batched_tokens": 24,
        "max_num_seqs": 12,
        "num_gpu_blocks_override": 12,
    },
}


def hsd(*levels) -> dict:
    return cascade(*levels, num_speculative_tokens=TOKENS)


@pytest.fixture(scope="module")
def head(small_vocabulary, tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("eagle3")
    return write_eagle3_head(small_vocabulary.target, directory, draft_vocabulary=4, trained=True)


@pytest.fixture(scope="module")
def engine(small_vocabulary) -> dict:
    return {"model": small_vocabulary.target, "block_size": 32}


@pytest.fixture(scope="module")
def plain(engine) -> dict:
    return run_engine(engine, JOBS)


# Text repeats sooner or later: the lookup drafts then, and the head does before.
CASCADES = {
    "alone": lambda head: hsd({"eagle3": head}),
    "next to a lookup": lambda head: hsd(
        {"sources": [{"ngram": {"min": 6, "max": 8}}, {"eagle3": head}]}
    ),
}


@pytest.fixture(
    scope="module",
    params=[(cascade, name) for cascade in CASCADES for name in ENGINES],
    ids=", ".join,
)
def speculated(request, engine, head) -> tuple[str, str, dict, dict]:
    """What drafts, in which engine, its results, and what `run_with_vllm_drafter` noted."""
    drafter, name = request.param
    arguments = {**engine, **CASCADES[drafter](head), **ENGINES[name]}
    return drafter, name, *run_engine(arguments, JOBS, work=recorded_heads.run_with_vllm_drafter)


@pytest.fixture(scope="module")
def reference(small_vocabulary, head) -> Reference:
    return Reference(small_vocabulary.target, head)


def test_greedy_equals_no_speculation(plain, speculated):
    _, _, results, _ = speculated
    assert all(job == "with sampled" and i % 2 == 0 for job, i in differing(results, plain))


def test_jobs_reach_the_conditions_they_name(speculated):
    drafter, name, results, drafts = speculated
    preempted = sum(result["counters"]["num_preemptions"] for result in results.values())
    assert (preempted > 0) == name.endswith("few blocks")
    assert results["prefix hits"]["counters"]["prefix_cache_hits"] > 0
    counters = results["batch 9"]["counters"]
    accepted = counters["spec_decode_num_accepted_tokens"]
    assert 0.1 < accepted / counters["spec_decode_num_draft_tokens"] < 0.9
    assert max(map(len, drafts)) >= 250
    by_lookup = sum(not is_own for _, is_own in drafts.values())
    assert (by_lookup > 5) == (drafter != "alone")


def check_drafts(drafts: dict, reference: Reference, every: int, shift: int = 0) -> float:
    """Share of the head's drafts, after every so many texts, that are the reference's."""
    own = [(text, draft) for text, (draft, is_own) in sorted(drafts.items()) if is_own and draft]
    # Where the text may not go on, drafts are filled up.
    inside = [(text, draft) for text, draft in own if len(text) + TOKENS < 256][::every]
    assert len(inside) > 30
    alike = [reference.guesses(list(text), draft, shift=shift) == draft for text, draft in inside]
    return sum(alike) / len(alike)


def test_drafts_equal_those_of_the_head_in_torch(speculated, reference):
    """After every text, through chunks, prefix hits, preemption and near max_model_len."""
    *_, drafts = speculated
    assert check_drafts(drafts, reference, every=7) == 1


def test_states_that_are_one_position_off_give_other_drafts(speculated, reference):
    """Control for the comparison above."""
    *_, drafts = speculated
    assert check_drafts(drafts, reference, every=5, shift=1) < 0.75


def test_an_adaptive_head_below_a_model(small_vocabulary, engine, head, plain):
    levels = [{"eagle3": head, "num_tokens": 2}, {"model": small_vocabulary.mid}]
    arguments = {**engine, **hsd(*levels), **ENGINES["chunked prefill, few blocks"]}
    arguments["speculative_config"]["adaptive"] = True
    jobs = {name: JOBS[name] for name in ("batch 1", "batch 9", "first", "prefix hits")}
    results = run_engine(arguments, jobs, patch="support.adversarial_depth:install")
    for job, result in results.items():
        assert result["outputs"] == plain[job]["outputs"]
        assert all(level["accepted"] > 0 for level in result["levels"])


def test_drafts_of_other_rows_than_the_kept_ones_are_caught(small_vocabulary, engine, head):
    """Negative control of the samples in test_level_kinds.py."""
    cases = {"temperature 0.7": CASES["temperature 0.7"]}
    job = sampling_job(cases, 2000)
    patch = "benchmarks.gpu.faults:install"
    result = run_engine({**engine, **hsd({"eagle3": head})}, {"sampled": job}, patch=patch)
    found = p_values(small_vocabulary.target, cases, result["sampled"])
    assert min(found.values()) < SIGNIFICANCE, found


def test_a_head_drafts_after_a_prefix_in_which_it_did_not_draft(
    small_vocabulary, engine, head, plain
):
    levels = [{"eagle3": head, "num_tokens": 2}, {"model": small_vocabulary.mid}]
    with started({**engine, **hsd(*levels)}) as process:
        for chosen in ([1], [0, 1]):
            process.select_levels(chosen, [2, TOKENS][-len(chosen) :])
            run = process.generate(SHARED, GREEDY)
            for ids, wanted in zip(run.token_ids, plain["prefix hits"]["outputs"], strict=True):
                assert ids == wanted[0]["ids"]
    assert run.levels[0]["drafted"] > run.levels[0]["accepted"] > 0
