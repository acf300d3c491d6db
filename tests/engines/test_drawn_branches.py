"""Several drawn drafts of one model: texts and distributions as without drafts."""

import random

import pytest
from support import drawn_branches, engines
from support.engines import ids
from support.exact_joint_distribution import chi_square_p_value, joint_distribution, marginal

LENGTH = drawn_branches.LENGTH
# Attention has room for 10 rows.
PLAIN = {"block_size": 32, "max_model_len": 160, "max_num_seqs": 10}
BASE = {**PLAIN, "max_num_batched_tokens": 64}
# A sound engine fails a comparison of samples with this probability.
KEPT = 1e-6


def engine(target: str, drafter: str, branches: int, **keys) -> dict:
    level = {"model": drafter, "branches": branches}
    hsd = {"method": "hsd", "num_speculative_tokens": LENGTH, "levels": [level]}
    return {"model": target, **BASE, "speculative_config": {**hsd, **keys}}


def served(arguments: dict, jobs: dict, fault: str | None = None, patch: str | None = None):
    """(results, what was seen); see `drawn_branches.run`."""
    return engines.run_engine(arguments, (jobs, fault), work=drawn_branches.run, patch=patch)


def test_texts_are_those_of_no_speculation(family, greedy_tokens, seeded_tokens):
    """Alone and among sampled requests, whose rows are verified together; prompts in chunks."""
    with engines.started(engine(family.target, family.mid, 3)) as process:
        results, seen = process.call(drawn_branches.run, (engines.JOBS, None))
        assert ids(results["joining"]) == greedy_tokens
        assert ids(results["mixed"])[0] == greedy_tokens[0]
        assert len(results["mixed"]["outputs"][1][0]["logprobs"]) == 9
        assert seen["won"] > 3
        results, seen = process.call(drawn_branches.run, (engines.SEEDED_JOBS, None))
    assert {name: ids(result) for name, result in results.items()} == seeded_tokens
    assert seen["won"] > 3


@pytest.mark.parametrize("faulty", [False, True])
def test_caches_of_sampled_requests_are_those_of_the_text(family, faulty):
    """Of both models, after rows that won together; not where the target keeps the chain's."""
    arguments = engine(family.target, family.small, 4)
    work = PROMPTS[2], {"max_tokens": 90, "ignore_eos": True, "temperature": 1}, faulty
    difference, won = engines.run_engine(arguments, work, work=drawn_branches.difference_of_caches)
    assert won > 2 and (difference > 0.1) == faulty, (difference, won)


def test_more_drafts_are_accepted_for_longer(as_on_gpus, family):
    """Tokens a step grow with the drafts, of a drafter that is often wrong."""
    params = {"max_tokens": 24, "ignore_eos": True}
    jobs = {"sampled": {"prompts": engines.PROMPTS[1:] * 4, "params": params}}
    steps = {}
    for rows in (1, 4):
        arguments = engine(family.target, family.small, rows)
        found = engines.run_engine({**arguments, "max_num_batched_tokens": 128}, jobs)
        steps[rows] = found["sampled"]["counters"]["spec_decode_num_drafts"]
    assert steps[4] < 0.95 * steps[1]


# Blocks for fewer requests than there are, steps of fewer tokens than all lists have.
CROWDED = {"num_gpu_blocks_override": 9, "max_num_seqs": 4, "max_num_batched_tokens": 26}
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
PROMPTS = [random.Random(i).choices(range(2, 62), k=6 + 9 * i) for i in range(4)]
JOBS = {
    "preempted": {"prompts": PROMPTS, "params": {**GREEDY, "max_tokens": 70}, "arrive": [0] * 4},
    # Prompts whose first block is known already, or all of it but a token.
    "prefix hits": {
        "prompts": [PROMPTS[3] + [7] * 9, PROMPTS[3] + [7] * 9, PROMPTS[3][:32] + [9] * 5],
        "params": {**GREEDY, "max_tokens": 12},
        "arrive": [0, 12, 12],
    },
    "to the end": {"prompts": [[(j * j) % 60 + 2 for j in range(130)]], "params": GREEDY},
}


@pytest.fixture(scope="module")
def plain(family) -> dict[str, list[list[int]]]:
    """Tokens without speculation, with room for all."""
    jobs = {name: {**job, "arrive": None} for name, job in JOBS.items()}
    found = engines.run_engine({"model": family.target, **PLAIN}, jobs)
    return {name: ids(result) for name, result in found.items()}


@pytest.mark.parametrize(
    "patch", [None, pytest.param("support.recorded_graph:serve", marks=pytest.mark.slow)]
)
def test_a_crowded_engine_loses_nothing(family, plain, patch):
    """Preemption, cut lists, prompts in chunks, prefix hits, texts up to max_model_len."""
    arguments = {**engine(family.target, family.mid, 2), **CROWDED}
    results, seen = served(arguments, JOBS, patch=patch)
    for name, wanted in plain.items():
        assert ids(results[name]) == wanted, name
    assert seen["won"] > 10 and seen["cut"] > 0, seen
    assert results["preempted"]["counters"]["num_preemptions"] > 0
    assert results["prefix hits"]["counters"]["prefix_cache_hits"] > 0
    level = results["preempted"]["levels"][0]
    counted = results["preempted"]["counters"]["spec_decode_num_accepted_tokens"]
    assert level["accepted"] == counted > 0


@pytest.mark.slow
def test_tensor_parallel_ranks_verify_alike(family, plain):
    """Each rank hosts rows and copies blocks of its own part of the caches."""
    jobs = {name: JOBS[name] for name in ("preempted", "prefix hits")}
    arguments = {**engine(family.target, family.mid, 3), "tensor_parallel_size": 2}
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    results = engines.run_engine(arguments, jobs, env=env)
    for name, result in results.items():
        assert ids(result) == plain[name], name
    assert results["preempted"]["levels"][0]["accepted"] > 10


def test_large_batches_draft_chains(family, plain):
    """More requests than rows are for, and more than may draft, at last."""
    jobs = {"preempted": {**JOBS["preempted"], "arrive": [0, 7, 10, 13]}}
    patch = "support.drawn_branches:allow_several_to_two"
    results, seen = served(engine(family.target, family.mid, 3), jobs, patch=patch)
    assert ids(results["preempted"]) == plain["preempted"]
    assert seen["won"] > 0 and seen["chains"] > 0, seen


TOKENS = 6
PROMPT = [(3 * j) % 5 for j in range(30)]
CASES: list[dict] = [{}, {"top_k": 3, "temperature": 1.3}, {"top_p": 0.8}]


def p_value(family, cases: list[dict], count: int, scale: float, fault: str | None = None):
    """(least p-value of tokens against their joint distribution, what was seen)."""
    arguments = engine(family.target, family.small, 4, disable_by_batch_size=64)
    arguments["speculative_config"]["levels"][0]["temperature_scale"] = scale
    # Attention has room for all rows of 16 requests, and a step for the tokens of as many.
    arguments |= {"max_num_seqs": 64, "max_num_batched_tokens": 16 * 4 * (LENGTH + 1)}
    shared = {"max_tokens": TOKENS, "ignore_eos": True}
    jobs = {str(c): {"prompts": [PROMPT] * count, "params": {**shared, **c}} for c in cases}
    results, seen = served(arguments, jobs, fault)
    found = []
    for case in cases:
        exact = joint_distribution(family.target, PROMPT, TOKENS, case)
        # The first token is of no draft.
        for part in (slice(1, 4), slice(3, TOKENS)):
            samples = [tuple(tokens[part]) for tokens in ids(results[str(case)])]
            found.append(chi_square_p_value(samples, marginal(exact, part)))
    print(found, seen)
    return min(found), seen


SLOW = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.mark.parametrize(
    ("count", "scale"),
    [(250, 2.5), *(pytest.param(6000, scale, marks=SLOW) for scale in (0.4, 1, 2.5))],
)
def test_samples_follow_the_target(small_vocabulary, count, scale):
    """With scales as of its controls, and one with which further rows win often."""
    found, seen = p_value(small_vocabulary, CASES, count, scale)
    assert found > KEPT
    assert seen["several"] > 2 * count and seen["won"] > count / 4


@pytest.mark.parametrize(
    ("fault", "count", "scale"),
    [
        ("drafts' rows of another place", 600, 1),
        pytest.param("all rows by the same uniforms", 6000, 0.4, marks=SLOW),
        pytest.param("target's rows of another draft", 6000, 1, marks=SLOW),
    ],
)
def test_faults_are_caught(small_vocabulary, fault, count, scale):
    """Negative controls; two need many samples, and are caught exactly in another file."""
    found, _ = p_value(small_vocabulary, [{}], count, scale, fault)
    assert found < KEPT
