"""EAGLE-3 heads below other levels: drafts are the head's own, whatever vLLM does with a request.

The reference recomputes head and target from the text alone (support/eagle3_head.py).
"""

import random

import pytest
from support import recorded_heads
from support.eagle3_head import Reference, write_eagle3_head
from support.engines import run_engine as run_plain
from support.level_files import cascade
from support.marks import slow
from support.v2_engines import run_engine

pytestmark = [pytest.mark.triton, pytest.mark.timeout(900)]

TOKENS = 6
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
PROMPTS = [random.Random(i).choices(range(5), k=4 + 12 * i) for i in range(6)]
# They share 64 tokens, two blocks of the cache.
SHARED = [[(j * j + j // 7) % 5 for j in range(64)] + [i % 5, i // 5, 3] for i in range(4)]
SHORT = [[1], [2, 3], [4, 0, 1]]
JOBS = {
    "batch 1": {"prompts": PROMPTS[-1:], "params": GREEDY},
    "batch 6": {"prompts": PROMPTS, "params": GREEDY},
    "short": {"prompts": SHORT, "params": GREEDY},
    # The first one alone, so that the others find its blocks.
    "first": {"prompts": SHARED[:1], "params": GREEDY},
    "prefix hits": {"prompts": SHARED, "params": GREEDY},
    "joining": {
        "prompts": PROMPTS,
        "params": [{**GREEDY, "max_tokens": 6 + 3 * i} for i in range(6)],
        "arrive": [2 * (i // 2) for i in range(6)],
        "abort": {5: 6},
    },
    "max_model_len": {"prompts": PROMPTS[::5], "params": {**GREEDY, "max_tokens": 200}},
    "with sampled": {
        "prompts": PROMPTS,
        "params": [GREEDY if i % 2 else {**GREEDY, "temperature": 1, "seed": i} for i in range(6)],
    },
}
ENGINES = {
    "whole prompts": {},
    "chunked prefill, few blocks": {
        "max_num_batched_tokens": 24,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 10,
    },
}


@pytest.fixture(scope="module")
def head(small_vocabulary, tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("eagle3")
    return write_eagle3_head(small_vocabulary.target, directory, draft_vocabulary=4, trained=True)


@pytest.fixture(scope="module")
def engine(small_vocabulary) -> dict:
    return {"model": small_vocabulary.target, "block_size": 32, "max_model_len": 128}


@pytest.fixture(scope="module")
def plain(engine) -> dict:
    return run_plain(engine, JOBS)


@pytest.fixture(scope="module")
def reference(small_vocabulary, head) -> Reference:
    return Reference(small_vocabulary.target, head)


def configured(name: str, head: str, family) -> dict:
    """{"speculative_config": ...}."""
    below = {"eagle3": head, "num_tokens": 2}
    top = {"model": family.mid}
    return {
        "model": cascade(below, top, num_speculative_tokens=TOKENS),
        "model, one round": cascade(below, {**top, "max_rounds": 1}, num_speculative_tokens=3),
        "two models": cascade(
            {"eagle3": head, "num_tokens": 1},
            {"model": family.small, "num_tokens": 3},
            top,
            num_speculative_tokens=6,
        ),
        "exit": cascade(below, {"early_exit": 1}, num_speculative_tokens=TOKENS),
        "lookup": cascade(
            {"sources": [{"ngram": {"max": 3}}, {"eagle3": head}], "num_tokens": 2},
            top,
            num_speculative_tokens=TOKENS,
        ),
        "horizontal": cascade(
            {"eagle3": head, "num_tokens": 1}, top, num_speculative_tokens=6, horizontal_tokens=2
        ),
        "adaptive": cascade(below, top, num_speculative_tokens=TOKENS, adaptive=True),
    }[name]


def served(
    engine: dict, directory, jobs=JOBS, patch: str = "support.recorded_heads:install"
) -> tuple[dict, dict]:
    """Results of the jobs, and what the head has drafted after which text."""
    file = directory / "drafts"
    results = run_engine(engine, jobs, patch=patch, env={recorded_heads.FILE: str(file)})
    return results, recorded_heads.read(file)


@pytest.fixture(scope="module", params=[*slow("whole prompts"), "chunked prefill, few blocks"])
def speculated(request, engine, head, small_vocabulary, tmp_path_factory) -> tuple:
    config = configured("model", head, small_vocabulary)
    arguments = {**engine, **config, **ENGINES[request.param]}
    return request.param, *served(arguments, tmp_path_factory.mktemp("recorded"))


def check_greedy(results: dict, plain: dict) -> None:
    for job, result in results.items():
        for i, (got, wanted) in enumerate(
            zip(result["outputs"], plain[job]["outputs"], strict=True)
        ):
            sampled = job == "with sampled" and i % 2 == 0
            if wanted and wanted[0]["finish"] and not sampled:
                assert got[0]["ids"] == wanted[0]["ids"], (job, i)


def check_drafts(drafts: dict, reference: Reference, every: int = 1, shift: int = 0) -> float:
    """Share of the drafts that are the reference's, of every so many texts."""
    keys = sorted(drafts)[::every]
    alike = [
        reference.guesses(list(text), [*drafted, drafts[text, drafted]], shift=shift)[-1]
        == drafts[text, drafted]
        for text, drafted in keys
    ]
    assert len(alike) > 30
    return sum(alike) / len(alike)


def test_greedy_equals_no_speculation(plain, speculated):
    _, results, _ = speculated
    check_greedy(results, plain)


def test_jobs_reach_the_conditions_they_name(speculated):
    name, results, drafts = speculated
    preempted = sum(result["counters"]["num_preemptions"] for result in results.values())
    assert (preempted > 0) == name.endswith("few blocks")
    assert results["prefix hits"]["counters"]["prefix_cache_hits"] > 0
    for level in results["batch 6"]["levels"]:
        assert 0.1 < level["accepted"] / level["drafted"] < 1
    assert max(len(text) for text, _ in drafts) >= 110
    assert min(len(text) for text, _ in drafts) <= 3
    # Later rounds go on after tokens that the level above has drawn.
    assert sum(len(drafted) > 2 for _, drafted in drafts) > 50


def test_drafts_equal_those_of_the_head_in_torch(speculated, reference):
    """In every round, through chunks, prefix hits, preemption and near max_model_len."""
    assert check_drafts(speculated[2], reference, every=5) == 1


def test_states_that_are_one_position_off_give_other_drafts(speculated, reference):
    """Control for the comparison above."""
    assert check_drafts(speculated[2], reference, every=11, shift=1) < 0.75


@pytest.mark.parametrize("fault", ["shifted", *slow("own_states", "hasty")])
def test_heads_that_are_fed_something_else_are_caught(
    fault, engine, head, small_vocabulary, plain, reference, tmp_path
):
    """Negative controls: the same comparison, with engines that are wrong; their text is right."""
    jobs = {"batch 6": JOBS["batch 6"]}
    config = configured("model", head, small_vocabulary)
    patch = f"support.recorded_heads:install_{fault}"
    results, drafts = served({**engine, **config}, tmp_path, jobs, patch)
    check_greedy(results, plain)
    share = check_drafts(drafts, reference)
    print(fault, share)
    assert share < 0.99


@pytest.mark.parametrize(
    "name", ["two models", *slow("lookup", "model, one round", "exit", "horizontal")]
)
def test_other_levels_above_and_beside(
    name, engine, head, small_vocabulary, plain, reference, tmp_path
):
    arguments = {**engine, **configured(name, head, small_vocabulary)}
    arguments |= ENGINES["chunked prefill, few blocks"]
    results, drafts = served(arguments, tmp_path)
    check_greedy(results, plain)
    assert check_drafts(drafts, reference, every=7) == 1
    assert all(level["accepted"] > 0 for level in results["batch 6"]["levels"])


@pytest.mark.parametrize("name", ["model", *slow("two models", "lookup", "horizontal")])
def test_graphs_draft_what_passes_without_them_draft(name, engine, head, small_vocabulary, plain):
    """By recorded graphs, through batches that need padding."""
    arguments = {**engine, **configured(name, head, small_vocabulary)}
    jobs = {job: JOBS[job] for job in ("batch 1", "batch 6", "joining", "prefix hits")}
    eager = run_engine(arguments, jobs)
    graphs = run_engine(arguments, jobs, patch="support.recorded_graph:serve")
    check_greedy(graphs, plain)
    for job in jobs:
        assert graphs[job]["levels"] == eager[job]["levels"], job
