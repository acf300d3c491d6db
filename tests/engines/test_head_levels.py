"""EAGLE-3 heads below other levels, and right below the target, by vLLM's own drafter or adaptive.

Drafts are the head's own, whatever vLLM does with a request.

The reference recomputes head and target from the text alone (support/eagle3_head.py).
"""

import os
import random
from unittest import mock

import pytest
from support import recorded_heads
from support.eagle3_head import Reference, write_eagle3_head
from support.engines import AS_ON_GPUS, differing, run_engine, started
from support.level_files import cascade
from support.marks import slow
from support.sampling_cases import CASES, LONG_CASES, SIGNIFICANCE, p_values, sampling_job

pytestmark = pytest.mark.timeout(900)

TOKENS, ALONE = 6, 4
IN_TURNS = "support.recorded_heads:install_in_turns"
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
    # Requests of one step share the blocks of one prompt.
    "same prompt": {
        "prompts": [[(3 * j + j // 5) % 5 for j in range(70)]] * 3,
        "params": {**GREEDY, "max_tokens": 12},
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
    return run_engine(engine, JOBS)


@pytest.fixture(scope="module")
def reference(small_vocabulary, head) -> Reference:
    return Reference(small_vocabulary.target, head)


def configured(name: str, head: str, family) -> dict:
    """{"speculative_config": ...}."""
    below, top = {"eagle3": head, "num_tokens": 2}, {"model": family.mid}
    one, small = {**below, "num_tokens": 1}, {"model": family.small, "num_tokens": 3}
    lookup = {"sources": [{"ngram": {"max": 3}}, {"eagle3": head}], "num_tokens": 2}
    levels, keys = {
        "model": ([below, top], {}),
        "model, one round": ([below, {**top, "max_rounds": 1}], {"num_speculative_tokens": 3}),
        "two models": ([one, small, top], {}),
        "exit": ([below, {"early_exit": 1}], {}),
        "lookup": ([lookup, top], {}),
        "horizontal": ([one, top], {"horizontal_tokens": 2}),
        "adaptive": ([below, top], {"adaptive": True}),
        "lookup, adaptive": ([{"sources": lookup["sources"]}], {"adaptive": True}),
    }[name]
    return cascade(*levels, **{"num_speculative_tokens": TOKENS, **keys})


def served(
    engine: dict, jobs=JOBS, patch: str = "support.recorded_heads:install"
) -> tuple[dict, dict]:
    """Results of the jobs, and what the head has drafted after which text."""
    return run_engine(engine, jobs, patch=patch, work=recorded_heads.run)


@pytest.fixture(
    scope="module",
    params=[
        ("chunked prefill, few blocks", "recursion"),
        ("chunked prefill, few blocks", "fixed schedule"),
        *slow(("whole prompts", "recursion"), ("whole prompts", "fixed schedule")),
    ],
    ids=", ".join,
)
def speculated(request, engine, head, small_vocabulary) -> tuple:
    name, how = request.param
    config = configured("model", head, small_vocabulary)
    with mock.patch.dict(os.environ, {AS_ON_GPUS: "1"} if how == "fixed schedule" else {}):
        return name, *served({**engine, **config, **ENGINES[name]})


def check_greedy(results: dict, plain: dict) -> None:
    """All but every second request of one job are greedy."""
    wrong = differing(results, plain)
    assert [(job, i) for job, i in wrong if job != "with sampled" or i % 2] == []


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
    fault, proposals, engine, head, small_vocabulary, plain, reference
):
    """Negative controls: the same comparison, with engines that are wrong; their text is right."""
    jobs = {"batch 6": JOBS["batch 6"]}
    config = configured("model", head, small_vocabulary)
    patch = f"support.recorded_heads:install_{fault}"
    results, drafts = served({**engine, **config}, jobs, patch)
    check_greedy(results, plain)
    share = check_drafts(drafts, reference)
    print(fault, share)
    assert share < 0.99


@pytest.mark.parametrize(
    "name", slow("two models", "lookup", "model, one round", "exit", "horizontal")
)
def test_other_levels_above_and_in_one_choice(
    name, proposals, engine, head, small_vocabulary, plain, reference
):
    arguments = {**engine, **configured(name, head, small_vocabulary)}
    arguments |= ENGINES["chunked prefill, few blocks"]
    results, drafts = served(arguments)
    check_greedy(results, plain)
    assert check_drafts(drafts, reference, every=7) == 1
    assert all(level["accepted"] > 0 for level in results["batch 6"]["levels"])


@pytest.mark.parametrize("name", ["model", *slow("two models", "lookup", "horizontal")])
def test_graphs_draft_what_passes_without_them_draft(
    name, as_on_gpus, engine, head, small_vocabulary, plain
):
    """By recorded graphs, through batches that need padding."""
    arguments = {**engine, **configured(name, head, small_vocabulary)}
    jobs = {job: JOBS[job] for job in ("batch 1", "batch 6", "joining", "prefix hits")}
    eager = run_engine(arguments, jobs)
    graphs = run_engine(arguments, jobs, patch="support.recorded_graph:serve")
    check_greedy(graphs, plain)
    for job in jobs:
        assert graphs[job]["levels"] == eager[job]["levels"], job


@pytest.mark.slow
def test_steps_of_any_length_are_read(proposals, engine, head, small_vocabulary, plain, reference):
    """Without graphs, of an adaptive cascade; also steps without a draft or a level."""
    arguments = {**engine, **configured("adaptive", head, small_vocabulary)}
    results, drafts = served({**arguments, "max_num_batched_tokens": 64}, patch=IN_TURNS)
    check_greedy(results, plain)
    assert check_drafts(drafts, reference, every=3) == 1


@pytest.mark.slow
@pytest.mark.parametrize("patch", ["install_graphs", "install_unread_graphs"])
def test_steps_without_drafts_are_read_by_graphs(
    patch, as_on_gpus, engine, head, small_vocabulary, reference
):
    """With a control whose cache has holes."""
    levels = [{"eagle3": head, "num_tokens": 2}, {"model": small_vocabulary.mid, "max_rounds": 1}]
    config = cascade(*levels, num_speculative_tokens=3, adaptive=True)
    params = {"temperature": 1, "max_tokens": 60, "ignore_eos": True}
    jobs = {"": {"prompts": PROMPTS[:4], "params": params}}
    patch = f"support.recorded_heads:{patch}"
    _, rows = served({**engine, **config, "max_num_seqs": 4}, jobs, patch)
    assert len(rows) > 20
    off = [abs(value - reference.logsumexp(list(text))) for (text, _), value in rows.items()]
    assert (max(off) < 1e-3) == patch.endswith("install_graphs")


def sampled(name: str, cases: tuple[str, ...], count: int, engine, head, family, patch=None):
    """p-values of sampled text against its exact distribution; every level drafts."""
    chosen = {case: {**CASES, **LONG_CASES}[case] for case in cases}
    # Room for a proposal of every request of a step.
    room = {"max_num_seqs": 32, "max_num_batched_tokens": 32 * 8}
    result = run_engine(
        {**engine, **configured(name, head, family), **room},
        {"": sampling_job(chosen, count)},
        patch=patch,
    )[""]
    assert all(level["drafted"] > level["accepted"] > 0 for level in result["levels"])
    found = p_values(family.target, chosen, result)
    print(name, found)
    return found


@pytest.mark.parametrize("name", ["model", *slow("two models", "lookup", "horizontal")])
def test_sampled_text_follows_the_target(name, proposals, engine, head, small_vocabulary):
    """Two comparisons of each case: sound ones fail with a probability of 8e-6 at most."""
    cases = ("temperature 1", "top_k", "with seeds", "top_p, long prompt")
    found = sampled(name, cases, 300, engine, head, small_vocabulary)
    assert min(found.values()) > SIGNIFICANCE


@pytest.mark.parametrize("fault", [False, True])
def test_sampled_text_follows_the_target_in_steps_of_any_source(
    fault, engine, head, small_vocabulary
):
    """Of a head as a level above a lookup, with a control that verifies wrong rows."""
    patch = "support.recorded_heads:install_colder_in_turns" if fault else IN_TURNS
    count = 600 if fault else 300
    given = "lookup, adaptive", ("temperature 1",), count, engine, head, small_vocabulary, patch
    assert (min(sampled(*given).values()) > SIGNIFICANCE) != fault


@pytest.mark.parametrize("fault", ["level", *slow("target")])
def test_wrong_rows_of_a_head_s_drafts_are_caught(fault, proposals, engine, head, small_vocabulary):
    """Negative control: they are verified as if they were drawn colder than they were."""
    patch = {
        "level": "support.recorded_heads:install_colder",
        "target": "benchmarks.gpu.faults:install",
    }[fault]
    found = sampled("model", ("temperature 1",), 600, engine, head, small_vocabulary, patch)
    assert min(found.values()) < SIGNIFICANCE


# Text repeats sooner or later: the lookup drafts then, and the head does before.
BELOW_THE_TARGET = {
    "alone": lambda head: cascade({"eagle3": head}, num_speculative_tokens=ALONE),
    "next to a lookup": lambda head: cascade(
        {"sources": [{"ngram": {"min": 6, "max": 8}}, {"eagle3": head}]},
        num_speculative_tokens=ALONE,
    ),
}


@pytest.fixture(
    scope="module",
    params=[(drafter, name) for drafter in BELOW_THE_TARGET for name in ENGINES],
    ids=", ".join,
)
def drafted(request, engine, head) -> tuple[str, str, dict, dict]:
    """What drafts, in which engine, its results, and what `run_with_vllm_drafter` noted."""
    drafter, name = request.param
    arguments = {**engine, **BELOW_THE_TARGET[drafter](head), **ENGINES[name]}
    return drafter, name, *run_engine(arguments, JOBS, work=recorded_heads.run_with_vllm_drafter)


def test_greedy_equals_no_speculation_below_the_target(plain, drafted):
    check_greedy(drafted[2], plain)


def test_jobs_reach_the_conditions_they_name_below_the_target(drafted):
    drafter, name, results, drafts = drafted
    preempted = sum(result["counters"]["num_preemptions"] for result in results.values())
    assert (preempted > 0) == name.endswith("few blocks")
    assert results["prefix hits"]["counters"]["prefix_cache_hits"] > 0
    counters = results["batch 6"]["counters"]
    accepted = counters["spec_decode_num_accepted_tokens"]
    assert 0.1 < accepted / counters["spec_decode_num_draft_tokens"] < 0.9
    assert max(map(len, drafts)) >= 122
    by_lookup = sum(not is_own for _, is_own in drafts.values())
    assert (by_lookup > 5) == (drafter != "alone")


@pytest.mark.parametrize("shift", [0, 1])
def test_drafts_of_vllms_drafter_equal_those_of_the_head_in_torch(shift, drafted, reference):
    """With a control: states that are one position off give other drafts."""
    own = [
        (text, draft) for text, (draft, is_own) in sorted(drafted[3].items()) if is_own and draft
    ]
    # Where the text may not go on, drafts are filled up.
    inside = [(text, draft) for text, draft in own if len(text) + ALONE < 128][::5]
    assert len(inside) > 30
    alike = [reference.guesses(list(text), draft, shift=shift) == draft for text, draft in inside]
    share = sum(alike) / len(alike)
    assert share < 0.75 if shift else share == 1


def test_an_adaptive_head_below_a_model(small_vocabulary, engine, head, plain):
    levels = [{"eagle3": head, "num_tokens": 2}, {"model": small_vocabulary.mid}]
    arguments = {
        **engine,
        **cascade(*levels, num_speculative_tokens=ALONE),
        **ENGINES["chunked prefill, few blocks"],
    }
    arguments["speculative_config"]["adaptive"] = True
    jobs = {name: JOBS[name] for name in ("batch 1", "batch 6", "first", "prefix hits")}
    results = run_engine(arguments, jobs, patch="support.adversarial_depth:install")
    for job, result in results.items():
        assert result["outputs"] == plain[job]["outputs"]
    for level in zip(*(result["levels"] for result in results.values()), strict=True):
        assert sum(each["accepted"] for each in level) > 0


@pytest.mark.parametrize("drafts", ["sources", "head"])
def test_an_adaptive_head_below_the_target(drafts, engine, head, plain, reference):
    """Alone, and as a level above lookups that it does not verify."""
    own = {"eagle3": head}
    levels = [own] if drafts == "head" else [{"sources": [{"ngram": {"max": 3}}, own]}]
    arguments = {
        **engine,
        **cascade(*levels, num_speculative_tokens=ALONE, adaptive=True),
        **ENGINES["chunked prefill, few blocks"],
    }
    results, noted = served(arguments, patch=IN_TURNS)
    check_greedy(results, plain)
    assert check_drafts(noted, reference, every=2) == 1
    levels = zip(*(result["levels"] for result in results.values()), strict=True)
    accepted = [sum(each["accepted"] for each in level) for level in levels]
    assert len(accepted) == 1 + (drafts == "sources") and min(accepted) > 0


def test_drafts_of_other_rows_than_the_kept_ones_are_caught(small_vocabulary, engine, head):
    """Negative control of the samples in test_level_kinds.py."""
    cases = {"temperature 0.7": CASES["temperature 0.7"]}
    job = sampling_job(cases, 2000)
    patch = "benchmarks.gpu.faults:install"
    result = run_engine(
        {**engine, **BELOW_THE_TARGET["alone"](head)}, {"sampled": job}, patch=patch
    )
    found = p_values(small_vocabulary.target, cases, result["sampled"])
    assert min(found.values()) < SIGNIFICANCE, found


def test_a_head_drafts_after_a_prefix_in_which_it_did_not_draft(
    small_vocabulary, engine, head, plain
):
    levels = [{"eagle3": head, "num_tokens": 2}, {"model": small_vocabulary.mid}]
    with started({**engine, **cascade(*levels, num_speculative_tokens=ALONE)}) as process:
        for chosen in ([1], [0, 1]):
            process.select_levels(chosen, [2, ALONE][-len(chosen) :])
            run = process.generate(SHARED, GREEDY)
            for ids, wanted in zip(run.token_ids, plain["prefix hits"]["outputs"], strict=True):
                assert ids == wanted[0]["ids"]
    assert run.levels[0]["drafted"] > run.levels[0]["accepted"] > 0
