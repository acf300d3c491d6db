"""Whole engines: cascades, and our verifier below vLLM's drafters."""

from unittest import mock

import pytest
from support import engines
from support.cascades import cascade, configuration, head, target_of
from support.engines import PROMPTS, PROPOSALS, RECURSION, SEEDED_JOBS, ids, run_engine, run_jobs
from support.marks import slow, slow_but

from vllm_hsd.cascade.entropy_stopping import DeviceThresholds

pytestmark = pytest.mark.timeout(900)


NAMES = ("two models", "stock model, equal", "mtp", "suffix", "suffix, model", "sources, model")
NAMES += ("entropy", "horizontal", "pairs, model", "choice", "choice, model", "three equal")
NAMES += ("head, model", "choice with a head", "choice with a head, model", "stock head")
NAMES += ("lookup, exit, model", "embedding, exit", "stock model, argmax", "stock n-gram")
# vLLM's own drafters, which draft alike whoever reads their drafts.
OWN = ("mtp", "choice with a head", *(name for name in NAMES if "stock" in name))
CASES = [(n, how) for n in NAMES for how in PROPOSALS if n not in OWN or how == RECURSION]


@pytest.mark.parametrize(
    ("name", "proposals"),
    slow_but([case for case in CASES if case[0] in NAMES[:3]], CASES),
    indirect=["proposals"],
)
def test_text_is_that_of_no_speculation(name, proposals, family, greedy_tokens, seeded_tokens):
    """Of greedy and seeded requests, prompts in chunks of 24 tokens at most.

    Programs of kernels run in a random order on two threads, their addresses are checked, and their
    arrays begin with poison.
    """
    engine = {"model": target_of(name, family), "max_num_batched_tokens": 24, "max_num_seqs": 4}
    engine["speculative_config"] = configuration(name, family)
    jobs = {"mixed": engines.JOBS["mixed"], "greedy": engines.JOBS["joining"], **SEEDED_JOBS}
    results = run_engine(engine, jobs, patch="support.triton_cpu:check_programs")
    assert ids(results["greedy"]) == greedy_tokens
    assert ids(results["mixed"])[0] == greedy_tokens[0]
    assert len(results["mixed"]["outputs"][1][0]["logprobs"]) == 9
    assert {job: ids(results[job]) for job in SEEDED_JOBS} == seeded_tokens
    # The target itself, with the same noise, drafts without knowing of penalties.
    for job, least_accepted in (("mixed", 1), ("together", 0.5)):
        counters = results[job]["counters"]
        accepted, drafted = (counters[f"spec_decode_num_{n}_tokens"] for n in ("accepted", "draft"))
        assert drafted > 0
        if name == "stock model, equal":
            assert accepted >= least_accepted * drafted
        elif "stock" not in name:  # small drafters of vLLM's may guess nothing
            assert accepted > 0


def again(llm, jobs: dict) -> list[dict]:
    """The last job alone, after the other, and with thresholds of the request before it."""
    alone = run_jobs(llm, {"last": jobs["last"]})
    forgetting = run_jobs(llm, jobs)
    with mock.patch.object(DeviceThresholds, "forget"):
        return [found["last"] for found in (alone, forgetting, run_jobs(llm, jobs))]


def test_a_slot_that_is_used_again_remembers_nothing(family):
    """Drafts that end by entropy are those of a request alone; with a negative control."""
    params = {**engines.GREEDY, "max_tokens": 40}
    prompts = {"before": PROMPTS[:3], "last": PROMPTS[3:]}
    jobs = {name: {"prompts": each, "params": params} for name, each in prompts.items()}
    config = configuration("entropy", family)
    engine = {"model": family.target, "max_num_seqs": 1, "speculative_config": config}
    found = run_engine(engine, jobs, work=again)
    drafted = [[(level["drafted"], level["accepted"]) for level in f["levels"]] for f in found]
    assert drafted[0] == drafted[1] != drafted[2]
    assert ids(found[0]) == ids(found[1]) == ids(found[2])


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("what", ["steps without drafts", *slow("passes that are skipped")])
def test_levels_have_read_every_step(what, fault, as_on_gpus, family):
    """Also those in which nothing pays, by CUDA graphs, or a target would reject its own drafts."""
    params = {"temperature": 1, "max_tokens": 60, "ignore_eos": True}
    model = {"model": family.target}
    level, adaptive, patch, control = {
        "steps without drafts": (model, True, "install", "leave_unread"),
        # The lookup next to the model finds nothing.
        "passes that are skipped": (
            {"sources": [{"ngram": {"min": 9, "max": 9}}, model]},
            False,
            "skip_passes",
            "leave_first_passes_unread",
        ),
    }[what]
    engine = {**model, "max_num_seqs": 4, "max_model_len": 128}
    engine["speculative_config"] = {**cascade([level]), "adaptive": adaptive}
    patch = f"support.steps_without_drafts:{patch}" + f"+{control}" * fault
    found = run_engine(engine, {"": {"prompts": PROMPTS, "params": params}}, patch=patch)[""]
    accepted, drafted = (
        found["counters"][f"spec_decode_num_{each}_tokens"] for each in ("accepted", "draft")
    )
    assert drafted > 50 and (accepted == drafted) == (not fault)
    if what == "passes that are skipped":
        assert found["levels"][0]["drafted"] < 2.5 * found["levels"][0]["rounds"]


@pytest.mark.slow
@pytest.mark.parametrize("other", [None, "ngram", "eagle3", "nothing is shared"])
def test_outputs_of_ended_requests_are_drafted_for_later_ones(other, family, greedy_tokens):
    """Of 9 tokens, the first of which comes with the prompt; a head's first drafts are trusted."""
    shared = {} if other == "nothing is shared" else {"shared_tokens": 500}
    suffix = {"suffix": {"min_acceptance": 0.01, **shared}}
    sources = {"ngram": {"ngram": {"min": 3, "max": 3}}, "eagle3": {"eagle3": head(family)}}
    level = {"sources": [suffix, sources[other]]} if other in sources else suffix
    one, two = [PROMPTS[1]], [PROMPTS[1], PROMPTS[2]]
    prompts = {"first": one, "again": one, "with another": two}
    jobs = {name: {"prompts": each, "params": engines.GREEDY} for name, each in prompts.items()}
    engine = {"model": family.target, "max_num_seqs": 2, "speculative_config": cascade([level])}
    results = run_engine(engine, jobs).values()
    assert [ids(result)[0] for result in results] == [greedy_tokens[1]] * 3
    counts = [result["counters"]["spec_decode_num_accepted_tokens"] for result in results]
    if shared:
        assert counts[0] < 4 <= counts[1] and counts[2] >= 5
    else:
        assert counts[0] == counts[1] < 4
