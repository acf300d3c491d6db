"""EAGLE-3 heads below other levels, and right below the target, by vLLM's own drafter or adaptive.

The reference recomputes head and target from the text alone (support/eagle3_head.py).
"""

import os
import random
from collections.abc import Callable
from itertools import product
from unittest import mock

import pytest
from support import recorded_heads
from support.eagle3_head import Reference, write_eagle3_head
from support.engines import AS_ON_GPUS, FIXED_SCHEDULE, PROPOSALS, differing, run_engine, started
from support.level_files import cascade
from support.marks import slow, slow_but
from support.sampling_cases import CASES, LONG_CASES, SIGNIFICANCE, p_values, sampling_job

pytestmark = pytest.mark.timeout(900)

TOKENS, ALONE = 6, 4
RECORDED = "support.recorded_heads:install"
IN_TURNS = f"{RECORDED} support.adversarial_depth:install+install_for_batches"
FAULT = "benchmarks.gpu.faults:install"
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
PROMPTS = [random.Random(i).choices(range(5), k=4 + 12 * i) for i in range(6)]
# They share 64 tokens, two blocks of the cache.
SHARED = [[(j * j + j // 7) % 5 for j in range(64)] + [i % 5, i // 5, 3] for i in range(4)]
JOBS = {
    "batch 1": {"prompts": PROMPTS[-1:], "params": GREEDY},
    "batch 6": {"prompts": PROMPTS, "params": GREEDY},
    "short": {"prompts": [[1], [2, 3], [4, 0, 1]], "params": GREEDY},
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
# Prompts in chunks, and few blocks.
CROWDED = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "num_gpu_blocks_override": 10}


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


@pytest.fixture(scope="module")
def configured(engine, head, small_vocabulary) -> Callable[[str], dict]:
    """Name -> arguments of the engine with a cascade."""
    own, top = {"eagle3": head}, {"model": small_vocabulary.mid}
    below, one = {**own, "num_tokens": 2}, {**own, "num_tokens": 1}
    small = {"model": small_vocabulary.small, "num_tokens": 3}
    lookup = {"sources": [{"ngram": {"max": 3}}, own]}
    # Text repeats sooner or later: such a lookup drafts then, and the head does before.
    late = {"sources": [{"ngram": {"min": 6, "max": 8}}, own]}
    alone, three = {"num_speculative_tokens": ALONE}, {"num_speculative_tokens": 3}
    adaptive = {"adaptive": True}
    cascades = {
        "model": ([below, top], {}),
        "model, one round": ([below, {**top, "max_rounds": 1}], three),
        "two models": ([one, small, top], {}),
        "exit": ([below, {"early_exit": 1}], {}),
        "lookup": ([{**lookup, "num_tokens": 2}, top], {}),
        "horizontal": ([one, top], {"horizontal_tokens": 2}),
        "model, adaptive": ([below, top], adaptive),
        "head, adaptive": ([own], adaptive),
        "lookup, adaptive": ([lookup], adaptive),
        "alone": ([own], alone),
        "next to a lookup": ([late], alone),
        "a lookup or the head": ([lookup], alone),
    }

    def arguments(name: str) -> dict:
        levels, keys = cascades[name]
        return {**engine, **cascade(*levels, **{"num_speculative_tokens": TOKENS, **keys})}

    return arguments


def served(engine: dict, jobs=JOBS, patch: str = RECORDED) -> tuple[dict, dict]:
    """Results of the jobs, and what the head has drafted after which text."""
    return run_engine(engine, jobs, patch=patch, work=recorded_heads.run)


@pytest.fixture(scope="module", params=PROPOSALS)
def speculated(request, configured) -> tuple[dict, dict]:
    fixed = {AS_ON_GPUS: "1"} if request.param == FIXED_SCHEDULE else {}
    with mock.patch.dict(os.environ, fixed):
        return served({**configured("model"), **CROWDED})


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


def check_crowded(results: dict, plain: dict) -> None:
    """Texts of a crowded engine, and that jobs reach the conditions that they name."""
    check_greedy(results, plain)
    assert sum(result["counters"]["num_preemptions"] for result in results.values()) > 0
    assert results["prefix hits"]["counters"]["prefix_cache_hits"] > 0


def test_greedy_equals_no_speculation_in_the_conditions_that_jobs_name(plain, speculated):
    results, drafts = speculated
    check_crowded(results, plain)
    for level in results["batch 6"]["levels"]:
        assert 0.1 < level["accepted"] / level["drafted"] < 1
    assert max(len(text) for text, _ in drafts) >= 110
    assert min(len(text) for text, _ in drafts) <= 3
    # Later rounds go on after tokens that the level above has drawn.
    assert sum(len(drafted) > 2 for _, drafted in drafts) > 50


@pytest.mark.parametrize("shift", [0, 1])
def test_drafts_equal_those_of_the_head_in_torch(shift, speculated, reference):
    """In every round; with a control: states that are one position off give other drafts."""
    share = check_drafts(speculated[1], reference, every=11 if shift else 5, shift=shift)
    assert share < 0.75 if shift else share == 1


@pytest.mark.parametrize(
    ("fault", "proposals"),
    slow_but(
        [("shift", FIXED_SCHEDULE)], product(("shift", "keep_own_states", "hurry"), PROPOSALS)
    ),
    indirect=["proposals"],
)
def test_heads_that_are_fed_something_else_are_caught(
    fault, proposals, configured, plain, reference
):
    """Negative controls: the same comparison, with engines that are wrong; their text is right."""
    jobs, patch = {"batch 6": JOBS["batch 6"]}, f"{RECORDED}+{fault}"
    results, drafts = served(configured("model"), jobs, patch)
    check_greedy(results, plain)
    share = check_drafts(drafts, reference)
    print(fault, share)
    assert share < 0.99


@pytest.mark.parametrize("stale", [False, True])
def test_what_a_head_never_reads_of_prompts_is_zeros_to_it(stale, configured, plain, reference):
    """With a control: it meets what earlier requests have left in the same blocks."""
    jobs = {job: JOBS[job] for job in ("max_model_len", "batch 6")}
    few_blocks = {"enable_prefix_caching": False, "num_gpu_blocks_override": 20}
    patch = f"{RECORDED}+keep_few" + "+leave_stale" * stale
    results, drafts = served({**configured("model"), **few_blocks}, jobs, patch)
    check_greedy(results, plain)
    alike = []
    for text, drafted in sorted(drafts)[::3]:
        prompt = max((p for p in PROMPTS if list(text[: len(p)]) == p), key=len)
        unread = max(len(prompt) - recorded_heads.FEW, 0)
        found = [*drafted, drafts[text, drafted]]
        alike.append(reference.guesses(list(text), found, unread=unread)[-1] == found[-1])
    share = sum(alike) / len(alike)
    assert len(alike) > 30 and (share < 0.99 if stale else share == 1), share


@pytest.mark.parametrize(
    "name", slow("two models", "lookup", "model, one round", "exit", "horizontal")
)
def test_other_levels_above_and_in_one_choice(name, proposals, configured, plain, reference):
    results, drafts = served({**configured(name), **CROWDED})
    check_greedy(results, plain)
    assert check_drafts(drafts, reference, every=7) == 1
    assert all(level["accepted"] > 0 for level in results["batch 6"]["levels"])


@pytest.mark.parametrize("name", ["model", *slow("two models", "lookup", "horizontal")])
def test_graphs_draft_what_passes_without_them_draft(name, as_on_gpus, configured, plain):
    """By recorded graphs, through batches that need padding."""
    jobs = {job: JOBS[job] for job in ("batch 1", "batch 6", "joining", "prefix hits")}
    eager = run_engine(configured(name), jobs)
    graphs = run_engine(configured(name), jobs, patch="support.recorded_graph:serve")
    check_greedy(graphs, plain)
    for job in jobs:
        assert graphs[job]["levels"] == eager[job]["levels"], job


@pytest.mark.parametrize("name", ["model, adaptive", "lookup, adaptive", *slow("head, adaptive")])
def test_steps_of_any_length_are_read(name, configured, plain, reference):
    """Also steps without a draft or a level; of a head below a model, alone and above a lookup."""
    arguments = {**configured(name), **CROWDED}
    results, drafts = served(arguments, patch=IN_TURNS)
    check_greedy(results, plain)
    assert check_drafts(drafts, reference, every=2) == 1
    levels = list(zip(*(result["levels"] for result in results.values()), strict=True))
    assert len(levels) == 1 + (name != "head, adaptive")
    for level in levels:
        assert sum(each["accepted"] for each in level) > 0


@pytest.mark.slow
def test_fixed_schedules_read_steps_of_any_length(as_on_gpus, configured, plain, reference):
    """Without graphs."""
    arguments = {**configured("model, adaptive"), "max_num_batched_tokens": 64}
    results, drafts = served(arguments, patch=IN_TURNS)
    check_greedy(results, plain)
    assert check_drafts(drafts, reference, every=3) == 1


@pytest.fixture
def sampled(configured, small_vocabulary) -> Callable[..., float]:
    """The least p-value of sampled text against its exact distribution; every level drafts."""

    def least(name: str, cases: tuple[str, ...], count: int, patch: str | None = None) -> float:
        chosen = {case: {**CASES, **LONG_CASES}[case] for case in cases}
        # Room for a proposal of every request of a step.
        arguments = {**configured(name), "max_num_seqs": 32, "max_num_batched_tokens": 32 * 8}
        result = run_engine(arguments, {"": sampling_job(chosen, count)}, patch=patch)[""]
        assert all(level["drafted"] > level["accepted"] > 0 for level in result["levels"])
        found = p_values(small_vocabulary.target, chosen, result)
        print(name, found)
        return min(found.values())

    return least


SAMPLED = "model", "two models", "lookup", "horizontal", "a lookup or the head"


@pytest.mark.parametrize(
    ("name", "proposals"),
    slow_but([("model", FIXED_SCHEDULE)], product(SAMPLED, PROPOSALS)),
    indirect=["proposals"],
)
def test_sampled_text_follows_the_target(name, proposals, sampled):
    """Two comparisons of each case: sound ones fail with a probability of 8e-6 at most."""
    cases = ("temperature 1", "top_k", "with seeds", "top_p, long prompt")
    assert sampled(name, cases, 300) > SIGNIFICANCE


@pytest.mark.parametrize("fault", [False, True])
def test_sampled_text_follows_the_target_in_steps_of_any_source(fault, sampled):
    """Of a head as a level above a lookup, with a control that verifies wrong rows."""
    patch = f"{IN_TURNS} {FAULT}" if fault else IN_TURNS
    p_value = sampled("lookup, adaptive", ("temperature 1",), 1200 if fault else 300, patch)
    assert (p_value > SIGNIFICANCE) != fault


@pytest.mark.parametrize(
    ("fault", "proposals"),
    slow_but([("level", FIXED_SCHEDULE)], product(("level", "target"), PROPOSALS)),
    indirect=["proposals"],
)
def test_wrong_rows_of_a_head_s_drafts_are_caught(fault, proposals, sampled):
    """Negative control: they are verified as if they were drawn colder than they were."""
    patch = {"level": "support.recorded_heads:verify_colder", "target": FAULT}[fault]
    assert sampled("model", ("temperature 1",), 600, patch) < SIGNIFICANCE


def test_wrong_rows_of_vllms_drafter_are_caught(sampled):
    """Negative control of the samples in test_level_kinds.py."""
    assert sampled("alone", ("temperature 0.7",), 2000, FAULT) < SIGNIFICANCE


@pytest.fixture(scope="module", params=["alone", "next to a lookup"])
def drafted(request, configured) -> tuple[str, dict, dict]:
    """What drafts, results, and what `run_with_vllm_drafter` noted."""
    engine = {**configured(request.param), **CROWDED}
    return request.param, *run_engine(engine, JOBS, work=recorded_heads.run_with_vllm_drafter)


def test_greedy_equals_no_speculation_below_the_target(plain, drafted):
    drafter, results, drafts = drafted
    check_crowded(results, plain)
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
        (text, draft) for text, (draft, is_own) in sorted(drafted[2].items()) if is_own and draft
    ]
    # Where the text may not go on, drafts are filled up.
    inside = [(text, draft) for text, draft in own if len(text) + ALONE < 128][::5]
    assert len(inside) > 30
    alike = [reference.guesses(list(text), draft, shift=shift) == draft for text, draft in inside]
    share = sum(alike) / len(alike)
    assert share < 0.75 if shift else share == 1


def test_a_head_drafts_after_a_prefix_in_which_it_did_not_draft(configured, plain):
    with started(configured("model")) as process:
        for chosen in ([1], [0, 1]):
            process.select_levels(chosen, [2, ALONE][-len(chosen) :])
            run = process.generate(SHARED, GREEDY)
            for ids, wanted in zip(run.token_ids, plain["prefix hits"]["outputs"], strict=True):
                assert ids == wanted[0]["ids"]
    assert run.levels[0]["drafted"] > run.levels[0]["accepted"] > 0
