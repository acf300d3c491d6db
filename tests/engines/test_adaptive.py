"""Adaptive depth in the engine: levels that switch in and out change no text and lose no cache."""

import pytest
from support.engines import ids, run_engine, run_jobs
from support.hosted_branches import runner_of
from support.level_files import cascade

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(5 + 9 * i)] for i in range(12)]
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
SAMPLED = {"temperature": 1, "max_tokens": 40, "ignore_eos": True}
SEEDED = [{**SAMPLED, "seed": 100 + i} for i in range(4)]

JOBS = {
    "batch": {"prompts": PROMPTS, "params": GREEDY},
    "prefix cache": {"prompts": PROMPTS, "params": GREEDY},
    "joining": {"prompts": PROMPTS, "params": GREEDY, "arrive": [3 * (i // 2) for i in range(12)]},
    "max_model_len": {"prompts": PROMPTS[::4], "params": {**GREEDY, "max_tokens": 400}},
    "sampled": {"prompts": PROMPTS, "params": SAMPLED},
    "sampled, prefix cache": {"prompts": PROMPTS, "params": SAMPLED},
    **{f"alone {i}": {"prompts": [PROMPTS[i]], "params": SEEDED[i]} for i in range(4)},
    "together": {"prompts": PROMPTS[:8], "params": SEEDED + [SAMPLED] * 4},
}
# A request ends with its first token, which cannot be known when its draft is requested.
EVERY = list(range(64))
GREEDY_JOBS = ("batch", "prefix cache", "joining", "max_model_len")
SWITCHING = "support.adversarial_depth:install"


def adaptive(*levels: dict) -> dict:
    return cascade(*levels, adaptive=True, num_speculative_tokens=7)


@pytest.fixture(scope="module")
def plain(family):
    jobs = {name: JOBS[name] for name in GREEDY_JOBS}
    return run_engine({"model": family.target}, jobs)


def run_copies(family, patch: str) -> dict:
    """Both levels are the target itself, in chunks, and in a cache that is too small."""
    engine = {
        "model": family.target,
        **adaptive({"model": family.target, "num_tokens": 3}, {"model": family.target}),
        "max_num_batched_tokens": 96,
        "max_num_seqs": 12,
        "block_size": 32,
        "num_gpu_blocks_override": 32,
    }
    return run_engine(engine, JOBS, patch=patch)


@pytest.fixture(scope="module")
def copies(family):
    return run_copies(family, SWITCHING)


def run_after_start(llm, jobs: dict) -> dict:
    """Results, and "timed" passes of each level, and of the target, before any request."""
    times = runner_of(llm).speculator.budget.budget.times
    return {"timed": [each.observed for each in times], **run_jobs(llm, jobs)}


@pytest.fixture(scope="module")
def learned(family):
    """The real budget over three different levels."""
    levels = [{"ngram": {"max": 3}}, {"model": family.small}, {"model": family.mid}]
    for level in levels[:2]:
        level["num_tokens"] = 3
    arguments = {"model": family.target, **adaptive(*levels)}
    return run_engine(arguments, JOBS, work=run_after_start)


def test_levels_with_passes_are_timed_before_there_are_requests(learned):
    assert learned["timed"] == [0, 3, 3, 0]


@pytest.fixture(scope="module")
def sources(family):
    """Two sources that take turns with each other and with no draft."""
    level = {"sources": [{"ngram": {"max": 3}}, {"model": family.small}]}
    return run_engine({"model": family.target, **adaptive(level)}, JOBS, patch=SWITCHING)


@pytest.mark.parametrize("job", GREEDY_JOBS)
@pytest.mark.parametrize("engine", ["copies", "learned", "sources"])
def test_same_tokens_as_without_speculation(plain, engine, job, request):
    assert ids(request.getfixturevalue(engine)[job]) == ids(plain[job])


def disagreements(results: dict) -> list[str]:
    """Jobs in which a copy of the target rejected drafts of the other."""
    found = []
    for name, result in results.items():
        # A preempted request's draft is never verified.
        dropped = 7 * result["counters"]["num_preemptions"]
        lost = [level["drafted"] - level["accepted"] for level in result["levels"]]
        found += [name] * (max(lost) > dropped)
    return found


def test_levels_that_were_left_out_catch_up_through_prefix_hits_and_preemption(copies):
    """A cache with a hole would make a copy of the target disagree with it."""
    assert disagreements(copies) == []
    counters = [result["counters"] for result in copies.values()]
    assert sum(count["num_preemptions"] for count in counters) > 0
    assert sum(count["num_preemptions"] == 0 for count in counters) > 3
    assert sum(count["prefix_cache_hits"] for count in counters) > 0


@pytest.mark.slow
def test_a_level_that_forgets_its_holes_is_caught(family):
    assert disagreements(run_copies(family, f"{SWITCHING}_and_forget_holes"))


@pytest.mark.parametrize("forgets", [False, True])
def test_a_model_among_sources_reads_a_prefix_that_another_request_has_left_unread(family, forgets):
    """A copy of the target disagrees with it where it takes such a prefix for its own.

    A first token does not wait for it: requests that end there leave their prompts unread.
    """
    keys = {"method": "hsd", "num_speculative_tokens": 4}
    level = {"sources": [{"ngram": {"min": 12, "max": 12}}, {"model": family.target}]}
    jobs = {
        "unread": {"prompts": PROMPTS, "params": {**SAMPLED, "seed": 1, "stop_token_ids": EVERY}},
        "read": {"prompts": PROMPTS, "params": {**GREEDY, "max_tokens": 12}},
    }
    speculative = {**keys, "levels": [level]}
    results = run_engine(
        {"model": family.target, "block_size": 32, "speculative_config": speculative},
        jobs,
        patch="support.adversarial_depth:install_free_drafts" + "_and_forget_holes" * forgets,
    )
    assert [level["drafted"] for level in results["unread"]["levels"]] == [0, 0]
    assert results["read"]["counters"]["prefix_cache_hits"] > 0
    level = results["read"]["levels"][-1]
    assert level["drafted"] > 0
    assert (level["accepted"] < level["drafted"]) == forgets


@pytest.mark.parametrize("engine", ["copies", "learned", "sources"])
def test_sampled_requests_with_a_seed_repeat_at_any_load(engine, request):
    results = request.getfixturevalue(engine)
    expected = [ids(results[f"alone {i}"])[0] for i in range(4)]
    assert ids(results["together"])[:4] == expected
