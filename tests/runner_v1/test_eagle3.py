"""EAGLE-3 heads as levels: drafts equal the head's own, whatever vLLM does with a request.

The reference recomputes head and target from the text alone (support/eagle3_head.py). vLLM's own
method "eagle3" gives drafts for the same texts.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import recorded_drafts
from support.eagle3_head import Reference, write_eagle3_head
from support.engines import differing, run_engine, started
from support.level_files import cascade
from support.sampling_cases import CASES, SIGNIFICANCE, p_values, sampling_job
from vllm.model_executor.layers.attention import MLAAttention

from vllm_hsd.runner_v1.eagle3 import KEPT_STATES, Eagle3Level

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


def recorded(engine: dict, directory, install: str = "install", jobs=JOBS) -> tuple[dict, dict]:
    """Results of the jobs, and text -> draft."""
    file = directory / "drafts"
    patch = f"support.recorded_drafts:{install}"
    results = run_engine(engine, jobs, patch=patch, env={recorded_drafts.FILE: str(file)})
    return results, recorded_drafts.read(file)


@pytest.fixture(scope="module", params=ENGINES)
def speculated(request, engine, head, tmp_path_factory) -> tuple[str, dict, dict]:
    arguments = {**engine, **hsd({"eagle3": head}), **ENGINES[request.param]}
    return request.param, *recorded(arguments, tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def reference(small_vocabulary, head) -> Reference:
    return Reference(small_vocabulary.target, head)


def test_greedy_equals_no_speculation(plain, speculated):
    _, results, _ = speculated
    assert all(job == "with sampled" and i % 2 == 0 for job, i in differing(results, plain))


def test_jobs_reach_the_conditions_they_name(speculated):
    name, results, drafts = speculated
    preempted = sum(result["counters"]["num_preemptions"] for result in results.values())
    assert (preempted > 0) == name.endswith("few blocks")
    assert results["prefix hits"]["counters"]["prefix_cache_hits"] > 0
    level = results["batch 9"]["levels"][0]
    assert 0.1 < level["accepted"] / level["drafted"] < 0.9
    assert max(map(len, drafts)) >= 250


def test_drafts_equal_those_of_the_head_in_torch(speculated, reference):
    """After every text, through chunks, prefix hits, preemption and near max_model_len."""
    _, _, drafts = speculated
    texts = sorted(drafts)[::7]
    assert len(texts) > 30
    for text in texts:
        assert drafts[text] == reference.guesses(list(text), drafts[text]), text


def test_states_that_are_one_position_off_give_other_drafts(speculated, reference):
    """Control for the comparison above."""
    _, _, drafts = speculated
    texts = [text for text in sorted(drafts)[::11] if len(drafts[text]) == TOKENS]
    off = sum(
        drafts[text] != reference.guesses(list(text), drafts[text], shift=1) for text in texts
    )
    assert off > len(texts) / 4


def test_drafts_equal_those_of_vllm(engine, head, speculated, tmp_path):
    name, _, drafts = speculated
    if name != "whole prompts":
        pytest.skip("one comparison is enough")
    stock = {"method": "eagle3", "model": head, "num_speculative_tokens": TOKENS}
    # Near max_model_len vLLM skips the head for the whole batch, whose cache then has holes.
    jobs = {name: job for name, job in JOBS.items() if name != "max_model_len"}
    _, theirs = recorded({**engine, "speculative_config": stock}, tmp_path, jobs=jobs)
    common = drafts.keys() & theirs.keys()
    assert len(common) > 100
    for text in common:
        assert drafts[text] == theirs[text][: len(drafts[text])], text


def test_a_head_that_takes_turns_with_lookups_catches_up_from_kept_states(
    engine, head, plain, reference, tmp_path
):
    sources = [{"ngram": {"min": 6, "max": 8}}, {"eagle3": head}]
    results, drafts = recorded(
        {**engine, **hsd({"sources": sources, "branches": 1})}, tmp_path, "install_with_a_head"
    )
    for job in ("batch 1", "batch 9", "prefix hits", "max_model_len"):
        assert results[job]["outputs"] == plain[job]["outputs"]
    # Text repeats sooner or later: lookups draft then, and the head does before.
    made = 0
    for text, (draft, source, unread) in drafts.items():
        if any(source):
            assert not set(unread) & set(range(len(text) - 1)[-KEPT_STATES:]), text
            guesses = reference.guesses(list(text), draft, unread)
            for token, guess, by_head in zip(draft, guesses, source, strict=True):
                made += by_head
                assert token == guess or not by_head, text
    assert made >= 5


def test_an_adaptive_head_reads_the_last_states(engine, head, plain, reference, tmp_path):
    """Steps without a draft, alone and in batches, through chunks, prefix hits and preemption."""
    arguments = {**engine, **hsd({"eagle3": head}), **ENGINES["chunked prefill, few blocks"]}
    arguments["speculative_config"]["adaptive"] = True
    jobs = {name: JOBS[name] for name in ("batch 1", "batch 9", "first", "prefix hits")}
    results, drafts = recorded(arguments, tmp_path, "install_with_a_head", jobs)
    for job, result in results.items():
        assert result["outputs"] == plain[job]["outputs"]
        level = result["levels"][0]
        assert level["requested"] > level["empty"] > 0
    texts = sorted(drafts)[::3]
    assert len(texts) > 30 and any(drafts[text][2] for text in texts)
    differ = 0
    for text in texts:
        draft, _, unread = drafts[text]
        assert draft == reference.guesses(list(text), draft, unread), text
        differ += draft != reference.guesses(list(text), draft)
        last = range(len(text) - 1)[-KEPT_STATES:]
        assert not set(unread) & set(last), text
    # What it passed over is not read, and it changes few drafts.
    assert 0 < differ < len(texts) / 2


def test_an_adaptive_head_below_a_model(small_vocabulary, engine, head, plain):
    levels = [{"eagle3": head, "num_tokens": 2}, {"model": small_vocabulary.mid}]
    arguments = {**engine, **hsd(*levels), **ENGINES["chunked prefill, few blocks"]}
    arguments["speculative_config"]["adaptive"] = True
    jobs = {name: JOBS[name] for name in ("batch 1", "batch 9", "first", "prefix hits")}
    results = run_engine(arguments, jobs, patch="support.adversarial_depth:install")
    for job, result in results.items():
        assert result["outputs"] == plain[job]["outputs"]
        assert all(level["accepted"] > 0 for level in result["levels"])


@pytest.mark.parametrize("kinds", [(), ({"ngram": {"max": 3}},)], ids=["alone", "with a lookup"])
def test_a_head_computes_nothing_where_nothing_pays(engine, head, plain, kinds):
    arguments = {**engine, **hsd({"sources": [*kinds, {"eagle3": head}]})}
    arguments["speculative_config"]["adaptive"] = True
    patch = "support.adversarial_depth:install_nothing_pays"
    result = run_engine(arguments, {"batch 9": JOBS["batch 9"]}, patch=patch)["batch 9"]
    assert result["outputs"] == plain["batch 9"]["outputs"]
    assert result["levels"][0]["forwards"] == result["levels"][0]["drafted"] == 0


def test_drafts_of_other_rows_than_the_kept_ones_are_caught(small_vocabulary, engine, head):
    """Negative control of the samples in test_level_kinds.py."""
    cases = {"temperature 0.7": CASES["temperature 0.7"]}
    job = sampling_job(cases, 2000)
    patch = "support.biased_sampler:install_drafts_of_other_rows"
    result = run_engine({**engine, **hsd({"eagle3": head})}, {"sampled": job}, patch=patch)
    found = p_values(small_vocabulary.target, cases, result["sampled"])
    assert min(found.values()) < SIGNIFICANCE, found


def test_entries_of_latent_attention_are_cleared():
    layer = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(layer)
    layer.kv_cache = torch.ones(4, 8, 6, dtype=torch.bfloat16)
    head = Eagle3Level.__new__(Eagle3Level)
    head.device = torch.device("cpu")
    context = SimpleNamespace(static_forward_context={"layer": layer})
    head.vllm_config = SimpleNamespace(compilation_config=context)
    head.attention_groups = [SimpleNamespace(kv_cache_group_id=0, layer_names=["layer"])]
    head.slots = lambda gid, rows, positions: 8 * rows + positions
    head.clear(np.array([1, 3]), np.array([2, 7]), np.array([5, 8]))
    cleared = {tuple(place) for place in (layer.kv_cache == 0).all(-1).nonzero().tolist()}
    assert cleared == {(1, 2), (1, 3), (1, 4), (3, 7)}


def test_a_head_drafts_after_a_prefix_that_it_has_not_read(
    small_vocabulary, engine, head, plain, tmp_path
):
    levels = [{"eagle3": head, "num_tokens": 2}, {"model": small_vocabulary.mid}]
    with started({**engine, **hsd(*levels)}) as process:
        for chosen in ([1], [0, 1]):
            process.select_levels(chosen, [2, TOKENS][-len(chosen) :])
            run = process.generate(SHARED, GREEDY)
            for ids, wanted in zip(run.token_ids, plain["prefix hits"]["outputs"], strict=True):
                assert ids == wanted[0]["ids"]
    assert run.levels[0]["drafted"] > run.levels[0]["accepted"] > 0
