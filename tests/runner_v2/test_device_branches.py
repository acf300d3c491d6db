"""Several drafts of a request in one pass on the V2 runner, interpreted: as without them."""

import itertools
import random

import pytest
from support import engines, v2_engines
from support.architectures import write_models
from support.engines import ids
from support.exact_joint_distribution import chi_square_p_value, joint_distribution
from support.hosted_branches import Avoiding, NoBranches, Oracle

pytestmark = pytest.mark.triton
SIZE, LENGTH = 32, 3
BASE = {"block_size": SIZE, "max_model_len": 160, "max_num_seqs": 10, "max_num_batched_tokens": 64}
PROMPTS = [random.Random(i).choices(range(2, 62), k=6 + 9 * i) for i in range(4)]
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
SHORT = {**GREEDY, "max_tokens": 12}
JOBS = {
    "joining": {"prompts": PROMPTS, "params": GREEDY, "arrive": [0, 2, 3, 5]},
    # Some have one row, next to requests with several; a prompt hits the prefix cache.
    "processed": {
        "prompts": [PROMPTS[3], *PROMPTS[1:]],
        "params": [{**SHORT, "presence_penalty": 0.5}, {**SHORT, "logprobs": 2}, SHORT, SHORT],
    },
    "to the end": {"prompts": [[(j * j) % 60 + 2 for j in range(130)]], "params": GREEDY},
}
KEPT = 1e-3


def cascade(*sources, branches: int, **keys) -> dict:
    levels = [{"sources": list(sources), "branches": branches}]
    hsd = {"method": "hsd", "num_speculative_tokens": LENGTH, "levels": levels}
    return {"speculative_config": {**hsd, **keys}}


def by_job(results: dict) -> dict[str, list[list[int]]]:
    return {name: ids(result) for name, result in results.items()}


LOOKUPS = {"ngram": {"max": 3}}, {"ngram": {"max": 1}}


def in_engine(llm, work):
    """What an engine's process does: jobs without a fault or with one; caches after a prompt."""
    from support import hosted_branches_v2

    source, cases, prompt = work
    found = {
        fault: hosted_branches_v2.run(llm, source, jobs, fault) for fault, jobs in cases.items()
    }
    if prompt is None:
        return found, None
    return found, hosted_branches_v2.difference_of_caches(llm, source, NoBranches(), prompt, 40)


def hosted(engine: dict, source, jobs: dict):
    """(results, what was seen) of jobs with branches of a source."""
    return v2_engines.run_engine(engine, (source, {None: jobs}, None), work=in_engine)[0][None]


def test_greedy_text_is_that_of_no_speculation(family, greedy_tokens):
    texts = [p + tokens for p, tokens in zip(v2_engines.PROMPTS, greedy_tokens, strict=True)]
    jobs = {"joining": v2_engines.JOBS["joining"]}
    engine = {"model": family.target, **BASE, **cascade(*LOOKUPS, branches=2)}
    results, seen = hosted(engine, Oracle(texts, 64, seed=1), jobs)
    assert ids(results["joining"]) == greedy_tokens
    assert seen["won"] > 3 and seen["misnamed"] == 0


@pytest.fixture(scope="module")
def plain(family) -> dict:
    """Tokens without speculation, on the V1 runner."""
    base = {key: value for key, value in BASE.items() if key != "max_num_batched_tokens"}
    return by_job(engines.run_engine({"model": family.target, **base}, JOBS))


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "sources", [LOOKUPS, ({"ngram": {"max": 3}}, {"suffix": {}})], ids=["ngrams", "suffix"]
)
def test_greedy_texts_and_caches_are_those_without_branches(family, plain, sources):
    texts = [
        prompt + output
        for name, job in JOBS.items()
        for prompt, output in zip(job["prompts"], plain[name], strict=True)
    ]
    joining = {"joining": JOBS["joining"]}
    faults = ["no copy of the text before a root", "no copy of what a branch computed"]
    cases = {None: JOBS, **dict.fromkeys(faults if sources is LOOKUPS else [], joining)}
    engine = {"model": family.target, **BASE, **cascade(*sources, branches=3)}
    work = Oracle(texts, 64, seed=1), cases, PROMPTS[2]
    found, (difference, won) = v2_engines.run_engine(engine, work, work=in_engine)
    results, seen = found.pop(None)
    assert by_job(results) == plain
    offsets = [key for key in seen if key.startswith("won at")]
    assert seen["won"] > 30 and len(offsets) > SIZE / 2 and seen["one row"] > 0, seen
    assert difference == 0 and won > 2
    # Controls: each copy matters.
    for fault, (results, _) in found.items():
        assert ids(results["joining"]) != plain["joining"], fault


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_preempted_requests_and_cut_lists(family, plain):
    """Blocks for fewer requests than there are, and steps of fewer tokens than their lists have."""
    jobs = {"joining": JOBS["joining"]}
    texts = [p + o for p, o in zip(PROMPTS, plain["joining"], strict=True)]
    engine = {"model": family.target, **BASE, **cascade(*LOOKUPS, branches=2)}
    # A block is never free, and the prompts have the other 9; at their ends texts have 14.
    engine |= {"num_gpu_blocks_override": 10, "max_num_seqs": 4, "max_num_batched_tokens": 22}
    jobs["joining"] = {**jobs["joining"], "arrive": [0, 0, 0, 0]}
    results, seen = hosted(engine, Oracle(texts, 64, seed=2), jobs)
    assert ids(results["joining"]) == plain["joining"]
    counters = results["joining"]["counters"]
    assert seen["won"] > 10 and seen["cut"] > 0 < counters["num_preemptions"], (counters, seen)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_layers_with_a_window_have_blocks_of_their_own(tmp_path):
    """Several KV-cache groups, which share the memory of their layers."""
    target, _ = write_models("Gemma2", tmp_path)
    jobs = {"text": {"prompts": PROMPTS[1:], "params": {**GREEDY, "max_tokens": 24}}}
    base = {key: value for key, value in BASE.items() if key != "max_num_batched_tokens"}
    plain = by_job(engines.run_engine({"model": target, **base}, jobs))
    texts = [p + o for p, o in zip(PROMPTS[1:], plain["text"], strict=True)]
    engine = {"model": target, **BASE, **cascade(*LOOKUPS, branches=3)}
    results, seen = hosted(engine, Oracle(texts, 64, seed=5), jobs)
    assert by_job(results) == plain
    assert seen["won"] > 8 and seen["groups"] > 1, seen


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("verifier", ["block", "coupled"])
def test_samples_follow_the_target(small_vocabulary, verifier):
    """Its controls are those of `kernels/test_branch_walk.py`: here 300 texts do not tell them."""
    prompt = [(3 * j) % 5 for j in range(30)]
    params = {"temperature": 1}
    job = {"prompts": [prompt] * 300, "params": {"max_tokens": 4, "ignore_eos": True, **params}}
    arguments = cascade(*LOOKUPS, branches=4, verifier=verifier)
    engine = {"model": small_vocabulary.target, **BASE, "max_num_seqs": 64, **arguments}
    engine["max_num_batched_tokens"] = 512
    results, seen = hosted(engine, Avoiding(5), {"sampled": job})
    found = chi_square_p_value(
        [tuple(tokens[:3]) for tokens in ids(results["sampled"])],
        joint_distribution(small_vocabulary.target, prompt, 3, params),
    )
    assert seen["won"] > 100 and found > KEPT, (seen, found)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_seeded_texts_are_those_of_plain_vllm(family, seeded_tokens):
    drawn = zip(v2_engines.PROMPTS * 2, itertools.chain(*seeded_tokens.values()), strict=True)
    engine = {"model": family.target, **BASE, **cascade(*LOOKUPS, branches=3)}
    work = Oracle([p + t for p, t in drawn], 64, seed=3), {None: v2_engines.SEEDED_JOBS}, None
    results, seen = v2_engines.run_engine(engine, work, work=in_engine)[0][None]
    assert by_job(results) == seeded_tokens
    assert seen["won"] > 3, seen


@pytest.mark.slow
def test_what_cannot_host_branches_is_refused(family):
    hsd = {"model": family.target, **BASE, **cascade(*LOOKUPS, branches=4)}
    few = {**hsd, "num_gpu_blocks_override": 30}
    with pytest.raises(RuntimeError, match=r"reserves 4 blocks .* max_num_seqs=10 .* has 30"):
        v2_engines.run_engine(few, {})
