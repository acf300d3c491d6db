"""Several drafts of a request in one pass: texts, caches and distributions as without them."""

import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import engines, hosted_branches, level_files
from support.adapters import write_adapter
from support.architectures import write_models
from support.engines import configuration_errors, differing, ids, run_engine, started
from support.hosted_branches import AsOffered, Avoiding, Oracle
from support.marks import slow
from support.sampling_cases import CASES, SIGNIFICANCE, p_values, sampling_job

from vllm_hsd.budget.goodput import FORBIDDEN
from vllm_hsd.cascade.text_store import collect_texts, write_store
from vllm_hsd.errors import UserError
from vllm_hsd.host.branch_caches import BranchCaches
from vllm_hsd.host.host_branches import HostBranches
from vllm_hsd.tools import system

SIZE, LENGTH = 32, 5
BASE = {"block_size": SIZE, "max_model_len": 512}
PROMPTS = [random.Random(i).choices(range(2, 62), k=4 + 9 * i) for i in range(12)]
SHARED = [[(j * j + j // 7) % 60 + 2 for j in range(70)] + [i + 2, 3] for i in range(6)]
GREEDY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
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
    # Their texts are those without speculation, too; with penalties they have one row.
    **{f"seeded, {name}": job for name, job in engines.SEEDED_JOBS.items()},
    "several": {
        "prompts": PROMPTS[:3],
        "params": [
            {**GREEDY, "temperature": 0.9, "max_tokens": 30, "seed": i, "n": 2 + i % 2}
            for i in range(3)
        ],
    },
}
LOOKUPS = {"ngram": {"max": 3}}, {"ngram": {"max": 1}}


def cascade(*sources, branches: int, **keys) -> dict:
    level = {"sources": list(sources or LOOKUPS), "branches": branches}
    return level_files.cascade(level, num_speculative_tokens=LENGTH, **keys)


def texts(jobs: dict, results: dict) -> list[list[int]]:
    """Prompts with each of their outputs, of all jobs, for an oracle."""
    return [
        prompt + sequence["ids"]
        for name, job in jobs.items()
        for prompt, output in zip(job["prompts"], results[name]["outputs"], strict=True)
        for sequence in output or []
    ]


def served(arguments: dict, *work, patch: str | None = None) -> tuple[dict, Counter]:
    """(results, what was seen); `work` as of `hosted_branches.run`."""
    with started({**BASE, **arguments}, patch=patch) as process:
        return process.call(hosted_branches.run, *work)


def compared(arguments: dict, jobs: dict, vocabulary: int = 64) -> tuple[dict, Counter]:
    """As `served`, of branches that follow known texts for a while; texts are asserted equal."""
    plain = run_engine({**BASE, **arguments}, jobs)
    oracle = Oracle(texts(jobs, plain), vocabulary, seed=1)
    results, seen = served({**arguments, **cascade(branches=3)}, oracle, jobs)
    assert differing(results, plain) == []
    return results, seen


@pytest.fixture(scope="module")
def plain(family) -> dict:
    return run_engine({"model": family.target, **BASE}, JOBS)


# The scheduler cuts lists of drafts, cuts prompts, and preempts.
CROWDED = {"max_num_batched_tokens": 50, "max_num_seqs": 12, "num_gpu_blocks_override": 36}
ENGINES = {
    "three drafts": (3, {}),
    "two drafts, few tokens and blocks": (2, CROWDED),
    "four drafts": (4, {}),
}


def test_the_rule_grows_branches_and_greedy_texts_stay(family, plain):
    # On a busy machine nothing may pay.
    patch = "support.adversarial_depth:install_free_drafts"
    arguments = {"model": family.target, **cascade(branches=3, adaptive=True)}
    results, seen = served(arguments, AsOffered(), JOBS, patch=patch)
    assert differing(results, plain) == []
    assert seen["won"] > 0 and seen["rows"] > 1
    for name, result in results.items():
        accepted = result["counters"]["spec_decode_num_accepted_tokens"]
        assert accepted == result["levels"][0]["accepted"], name


@pytest.mark.parametrize("name", [*list(ENGINES)[:2], *slow("four drafts")])
def test_greedy_texts_and_caches_are_those_without_branches(family, plain, name):
    branches, arguments = ENGINES[name]
    oracle = Oracle(texts(JOBS, plain), 64, seed=1)
    engine = {**BASE, "model": family.target, **cascade(branches=branches), **arguments}
    with started(engine) as process:
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
            assert preempted > 0
        else:
            assert results["prefix hits"]["counters"]["prefix_cache_hits"] > 0
        work = oracle, PROMPTS[5], 120
        difference, won = process.call(hosted_branches.difference_of_caches, *work)
        assert difference == 0 and won > 3
        if arguments:
            return
        # Controls: each copy matters.
        job = {"batch 12": JOBS["batch 12"]}
        for fault in ("no copy of the text before a root", "no copy of what a branch computed"):
            results, _ = process.call(hosted_branches.run, oracle, job, fault)
            assert len(differing(results, plain)) > 6, fault


SLOW, VERIFIERS = [pytest.mark.slow, pytest.mark.timeout(3000)], ("block", "standard", "coupled")


@pytest.mark.parametrize(
    ("verifier", "count"),
    [("block", 250), *(pytest.param(v, 15000, marks=SLOW) for v in VERIFIERS)],
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


def test_layers_with_a_window_have_blocks_of_their_own(tmp_path):
    """Several KV-cache groups, which share the memory of their layers."""
    target, _ = write_models("Gemma2", tmp_path)
    jobs = {"text": {"prompts": PROMPTS[:6], "params": {**GREEDY, "max_tokens": 40}}}
    _, seen = compared({"model": target}, jobs)
    assert seen["won"] > 10 and seen["groups"] > 1


def test_what_cannot_host_branches_is_refused(family):
    hsd = {"model": family.target, "block_size": SIZE, "max_num_seqs": 8, **cascade(branches=4)}
    for key, value, said in (
        ("num_gpu_blocks_override", 30, r"reserves 7 blocks .* max_num_seqs=8 .* has 30"),
        ("max_num_seqs", 2, r"max_num_seqs=2 in all"),
    ):
        with pytest.raises(RuntimeError, match=said):
            run_engine({**hsd, key: value}, {})
    connected = {**hsd, "kv_transfer_config": {"kv_connector": "X", "kv_role": "kv_both"}}
    assert "levels[0].branches" in configuration_errors([connected])[0]


# With what requests and engines may ask for.
OTHERS = [random.Random(i).choices(range(3, 62), k=4 + 9 * i) for i in range(9)]
SHORT = {**GREEDY, "max_tokens": 24}
# Attention has room for three rows of each request.
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "max_num_seqs": 27}


def test_adapters_of_the_target(family, tmp_path):
    first, second = (write_adapter(tmp_path / str(i), family.target, seed=i) for i in (1, 2))
    adapters = [None, first, second] * 3
    job = {"prompts": OTHERS, "params": SHORT, "adapters": adapters}
    jobs = {"mixed": job, "others": {**job, "adapters": adapters[1:] + adapters[:1]}}
    results, seen = compared({"model": family.target, **LORA}, jobs)
    assert seen["won"] > 30
    mixed, others = (results[name]["outputs"] for name in jobs)
    assert all(a != b for a, b in zip(mixed, others, strict=True))


@pytest.mark.skipif(
    system.flags().isdisjoint({"avx512f", "amx_tile"}), reason="vLLM has no such caches on this CPU"
)
@pytest.mark.parametrize("dtype", ["fp8_e4m3", *slow("fp8_e5m2")])
def test_caches_of_eight_bits(family, dtype):
    jobs = {"text": {"prompts": OTHERS, "params": SHORT}}
    _, seen = compared({"model": family.target, "kv_cache_dtype": dtype}, jobs)
    assert seen["won"] > 30


def test_caches_with_blocks_of_several_sizes_have_no_branches():
    speculative = SimpleNamespace(room_mistake=lambda *_: None)
    cache = SimpleNamespace(block_size=SIZE, num_gpu_blocks=9)
    tables = SimpleNamespace(block_sizes=[SIZE, 2 * SIZE], block_tables=[])
    hosted = HostBranches.__new__(HostBranches)
    hosted.runner = SimpleNamespace(
        vllm_config=SimpleNamespace(cache_config=cache, speculative_config=speculative),
        **{"block_tables": tables, "max_num_reqs": 8, "device": torch.device("cpu")},
    )
    hosted.runner.attn_groups = []
    hosted.most, hosted.longest, hosted.caches = 4, LENGTH, BranchCaches(hosted.runner)
    given = SimpleNamespace(kv_cache_groups=[None] * 2, num_blocks=9)
    with pytest.raises(UserError, match="KV-cache layout that vLLM chose: remove branches"):
        hosted.set_attn(given)


@pytest.mark.slow
def test_tensor_parallel_ranks(family, tmp_path):
    """Each rank copies blocks of its own heads; the drafts are those of lookups."""
    jobs = {"text": {"prompts": OTHERS, "params": SHORT}}
    plain = run_engine({"model": family.target, **BASE}, jobs)["text"]
    written = zip(OTHERS, ids(plain), strict=True)
    store = str(tmp_path / "store.safetensors")
    write_store(collect_texts([np.array(prompt + text) for prompt, text in written], 64), store)
    sources = [{"ngram": {"max": 1}}, {"suffix": {"store": store, "min_acceptance": 0.01}}]
    arguments = {"tensor_parallel_size": 2, "max_num_seqs": 36}
    engine = {"model": family.target, **BASE, **arguments, **cascade(*sources, branches=4)}
    result = run_engine(engine, jobs, env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})["text"]
    assert result["outputs"] == plain["outputs"]
    counters = result["counters"]
    listed = counters["spec_decode_num_draft_tokens"] / counters["spec_decode_num_drafts"]
    # Lists of more tokens than a chain has.
    assert listed > 5 and counters["spec_decode_num_accepted_tokens"] > 100


def test_texts_of_lookups_at_prices_that_change(family, greedy_tokens, seeded_tokens):
    sources = {"ngram": {"min": 1, "max": 3}}, {"suffix": {"min_acceptance": 0.01}}
    engine = {"model": family.target, **BASE, "max_num_seqs": 12, "max_num_batched_tokens": 256}
    engine |= cascade(*sources, branches=3, adaptive=True)
    jobs = {"greedy": engines.JOBS["joining"], **engines.SEEDED_JOBS}
    found = run_engine(engine, jobs, patch="support.adversarial_depth:install")
    assert ids(found["greedy"]) == greedy_tokens
    assert found["greedy"]["levels"][0]["drafted"] > 0
    assert {job: ids(found[job]) for job in engines.SEEDED_JOBS} == seeded_tokens


@pytest.mark.parametrize(
    ("price", "chained", "kept"),
    [
        (0.0, False, [3, 2]),
        (0.45, False, [1, 1]),
        (0.3, False, [1, 1]),
        (0.2, False, [2, 2]),
        (FORBIDDEN, False, [0, 0]),
        # A request of chains alone has no branches to price.
        (0.0, True, [0, 0]),
    ],
)
def test_tokens_that_do_not_pay_are_cut(price, chained, kept):
    """Each token of .5 survives half as often as the one before; the chain has none here."""
    tokens = torch.tensor([[[7, 8, 9], [5, 6, 4]]], dtype=torch.int32)
    # By one of two sources.
    offered = torch.zeros(2, 2, 3, dtype=torch.int32)
    offered[:, 0] = tokens[0]
    lookup = SimpleNamespace(
        branches=tokens,
        branch_counts=torch.tensor([[3, 2]], dtype=torch.int32),
        token_ids=offered,
        counts=torch.full((2, 2), 3, dtype=torch.int32),
        expected=torch.full((2, 2, 3), 0.5, dtype=torch.float64),
        own=torch.zeros(2, 2, 2, dtype=torch.float64),
        prior=torch.tensor([5.0], dtype=torch.float64),
    )
    branches = HostBranches.__new__(HostBranches)
    branches.lookup, branches.chained = lookup, np.array([chained])
    state = SimpleNamespace(slot=torch.tensor([0]), batch=1)
    drafts, chains = np.ones(1, dtype=bool), np.zeros((1, 3))
    found = branches.keep_what_pays(state, drafts, chains, price * np.arange(20))
    assert lookup.branch_counts.tolist() == [kept] and found.tolist() == [sum(kept)]
