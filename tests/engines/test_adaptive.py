"""Adaptive depth in the engine: levels that switch in and out change no text and lose no cache."""

import pytest
from support import clocks
from support.cascades import head
from support.engines import ids, run_engine, run_jobs
from support.hosted_branches import runner_of
from support.level_files import cascade

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(5 + 9 * i)] for i in range(12)]
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
SAMPLED = {"temperature": 1, "max_tokens": 40, "ignore_eos": True}
# Of requests that end before anything drafts for them, and leave their prompts unread.
UNREAD = [prompt[::-1] for prompt in PROMPTS[6:10]]

JOBS = {
    "batch": {"prompts": PROMPTS, "params": GREEDY},
    "prefix cache": {"prompts": PROMPTS, "params": GREEDY},
    "joining": {"prompts": PROMPTS, "params": GREEDY, "arrive": [3 * (i // 2) for i in range(12)]},
    "max_model_len": {"prompts": PROMPTS[::4], "params": {**GREEDY, "max_tokens": 400}},
    "unread": {"prompts": UNREAD, "params": {**GREEDY, "max_tokens": 1}},
    "hits of what was left unread": {"prompts": UNREAD, "params": GREEDY},
    "sampled": {"prompts": PROMPTS, "params": SAMPLED},
    "sampled, prefix cache": {"prompts": PROMPTS, "params": SAMPLED},
    **{f"alone {i}": {"prompts": [PROMPTS[i]], "params": SAMPLED} for i in range(4)},
}
# A request ends with its first token, which cannot be known when its draft is requested.
EVERY = list(range(64))
GREEDY_JOBS = ("batch", "prefix cache", "joining", "max_model_len", "hits of what was left unread")
SWITCHING = "support.adversarial_depth:install"


def adaptive(*levels: dict) -> dict:
    return cascade(*levels, adaptive=True, num_speculative_tokens=7)


@pytest.fixture(scope="module")
def plain(family):
    jobs = {name: JOBS[name] for name in GREEDY_JOBS}
    return run_engine({"model": family.target}, jobs)


def run_copies(family, patch: str) -> dict:
    """Both levels are the target itself, in chunks, and in a cache that is too small."""
    target = {"model": family.target}
    crowded = {"max_num_batched_tokens": 96, "max_num_seqs": 12, "num_gpu_blocks_override": 32}
    engine = {
        **target,
        "block_size": 32,
        **crowded,
        **adaptive({**target, "num_tokens": 3}, target),
    }
    return run_engine(engine, JOBS, patch=patch)


def run_after_start(llm, jobs: dict) -> dict:
    """Results, and "timed" passes of each level, and of the target, before any request."""
    times = runner_of(llm).speculator.budget.budget.times
    return {"timed": [each.observed for each in times], **run_jobs(llm, jobs)}


@pytest.fixture(scope="module")
def results(family) -> dict[str, dict]:
    """Of copies of the target that take turns with no draft, and of the real budget."""
    lookup, small, three = {"ngram": {"max": 3}}, {"model": family.small}, {"num_tokens": 3}
    learned = adaptive(lookup | three, small | three, {"model": family.mid})
    engine = {"model": family.target, **learned}
    jobs = {name: JOBS[name] for name in GREEDY_JOBS}
    return {
        "copies": run_copies(family, SWITCHING),
        "learned": run_engine(engine, jobs, work=run_after_start),
    }


def test_levels_with_passes_are_timed_before_there_are_requests(results):
    assert results["learned"]["timed"] == [0, 3, 3, 0]


@pytest.mark.parametrize("job", GREEDY_JOBS)
@pytest.mark.parametrize("engine", ["copies", "learned"])
def test_same_tokens_as_without_speculation(plain, engine, job, results):
    assert ids(results[engine][job]) == ids(plain[job])


def disagreements(results: dict) -> list[str]:
    """Jobs in which a copy rejected drafts of the other; a preempted draft is never verified."""
    return [
        name
        for name, result in results.items()
        for level in result["levels"]
        if level["drafted"] - level["accepted"] > 7 * result["counters"]["num_preemptions"]
    ]


def test_levels_that_were_left_out_catch_up_through_prefix_hits_and_preemption(results):
    """A cache with a hole would make a copy of the target disagree with it."""
    assert disagreements(results["copies"]) == []
    counters = [result["counters"] for result in results["copies"].values()]
    assert sum(count["num_preemptions"] for count in counters) > 0
    assert sum(count["num_preemptions"] == 0 for count in counters) > 3
    assert sum(count["prefix_cache_hits"] for count in counters) > 0


@pytest.mark.slow
def test_a_level_that_forgets_its_holes_is_caught(family):
    assert disagreements(run_copies(family, f"{SWITCHING}+forget_holes"))


@pytest.mark.parametrize("forgets", [False, True])
def test_a_model_among_sources_reads_a_prefix_that_another_request_has_left_unread(family, forgets):
    """A first token does not wait for it: requests that end there leave their prompts unread."""
    level = {"sources": [{"ngram": {"min": 12, "max": 12}}, {"model": family.target}]}
    engine = cascade(level, adaptive=True, num_speculative_tokens=4)
    jobs = {
        "unread": {"prompts": PROMPTS, "params": {**SAMPLED, "seed": 1, "stop_token_ids": EVERY}},
        "read": {"prompts": PROMPTS, "params": {**GREEDY, "max_tokens": 12}},
    }
    results = run_engine(
        {"model": family.target, "block_size": 32, **engine},
        jobs,
        patch="support.adversarial_depth:install_free_drafts" + "+forget_holes" * forgets,
    )
    assert [level["drafted"] for level in results["unread"]["levels"]] == [0, 0]
    assert results["read"]["counters"]["prefix_cache_hits"] > 0
    level = results["read"]["levels"][-1]
    assert level["drafted"] > 0
    assert (level["accepted"] < level["drafted"]) == forgets


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head above a lookup", "lookup", "levels"])
def test_ranks_whose_clocks_disagree_draft_alike(kind, family, plain, tmp_path):
    """With tensor parallelism one rank decides for all."""
    lookup = {"ngram": {"max": 3}}
    levels = {
        "head above a lookup": [{"sources": [lookup, {"eagle3": head(family)}]}],
        "lookup": [lookup],
        "levels": [{**lookup, "num_tokens": 3}, {"model": family.small}],
    }[kind]
    engine = {"model": family.target, "worker_extension_cls": "support.clocks.Worker"}
    engine |= {"tensor_parallel_size": 2, **cascade(*levels, adaptive=True)}
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", clocks.DIRECTORY: str(tmp_path)}
    jobs = {name: JOBS[name] for name in ("batch", "sampled")}
    found = run_engine(engine, jobs, env=env)
    assert found["batch"]["outputs"] == plain["batch"]["outputs"]
    first, second = clocks.read(tmp_path)
    assert [agreed for _, agreed in first] == [agreed for _, agreed in second]
    # Otherwise nothing has been tested.
    assert len(first) > 20 and sum(own != agreed for own, agreed in second) > 5
