"""Whole engines: cascades, and our verifier below vLLM's drafters."""

import functools
import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from support import skipped_passes
from support.cascades import cascade, configuration, head, target_of
from support.engines import GREEDY, JOBS, PROMPTS, SEEDED_JOBS, ids, run_engine, run_jobs
from support.marks import slow
from transformers import AutoModelForCausalLM

from vllm_hsd.cascade.entropy_stopping import DeviceThresholds
from vllm_hsd.cascade.text_store import collect_texts, write_store

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    "name",
    [
        *("two models", "stock model, equal", "stock head", "mtp"),
        *slow("suffix", "suffix, model", "sources, model", "entropy", "horizontal"),
        *slow("pairs, model", "choice", "choice, model", "choice with a head", "three equal"),
        *slow("head, model", "choice with a head, model"),
        *slow("lookup, exit, model", "embedding, exit", "stock model, argmax", "stock n-gram"),
    ],
)
def test_text_is_that_of_no_speculation(name, proposals, family, greedy_tokens, seeded_tokens):
    """Of greedy and seeded requests, prompts in chunks of 24 tokens at most.

    Programs of kernels run in a random order on two threads, their addresses are checked, and their
    arrays begin with poison.
    """
    engine = {"model": target_of(name, family), "max_num_batched_tokens": 24, "max_num_seqs": 4}
    engine["speculative_config"] = configuration(name, family)
    jobs = {"mixed": JOBS["mixed"], "greedy": JOBS["joining"], **SEEDED_JOBS}
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


# Blocks of 32 tokens (a CPU takes no smaller ones), of which there are too few for all requests at
# once; 16 tokens in a step, so that some of four requests with 5 tokens each sit a step out.
CROWDED = {
    "block_size": 32,
    "num_gpu_blocks_override": 5,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "max_model_len": 64,
}
LONG = [[(5 * i + j) % 60 + 2 for j in range(20 + 4 * i)] for i in range(4)]
SHARED = LONG[3] + LONG[0]
TO_THE_END = {"temperature": 0, "max_tokens": 64, "ignore_eos": True}
CROWDED_JOBS = {
    "preempted": {"prompts": LONG, "params": {**TO_THE_END, "max_tokens": 30}},
    # Prompts whose first block is known already; then all of a prompt but a token.
    "prefix hits": {
        "prompts": [SHARED[:40], SHARED[:40], SHARED[:32] + [9] * 9, SHARED[:33]],
        "params": {**TO_THE_END, "max_tokens": 8},
        "arrive": [0, 9, 9, 9],
    },
    # Up to max_model_len, and prompts that leave room for a token or two.
    "to the end": {"prompts": [LONG[0], [7, 8] * 31, [9] * 63, LONG[1]], "params": TO_THE_END},
}


@pytest.fixture(scope="module")
def crowded_plain(family):
    """Tokens without speculation, with room for all."""
    jobs = {name: {**job, "arrive": None} for name, job in CROWDED_JOBS.items()}
    found = run_engine({"model": family.target, "max_model_len": 64}, jobs)
    return {name: ids(result) for name, result in found.items()}


# Whether levels, on GPUs the lengths of a batch, change: by what was faster, or at random.
ALWAYS, LEARNED, AT_RANDOM = "always", "what pays", "at random"
PATCHES = {
    ("graphs", ALWAYS): "support.recorded_graph:serve",
    ("recursion", AT_RANDOM): "support.adversarial_depth:install",
    ("fixed schedule", AT_RANDOM): "support.adversarial_depth:install_for_batches",
}
CROWDED_NAMES = ("two models", "suffix, model", "sources, model", "choice, model", "head, model")
CROWDED_NAMES += ("choice with a head, model", "lookup, exit, model")
HOWS = ("recursion", "fixed schedule", "graphs")


@pytest.mark.parametrize(
    ("name", "how", "drafts"),
    [
        ("suffix, model", "recursion", AT_RANDOM),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *itertools.product(CROWDED_NAMES, HOWS, [ALWAYS]),
                ("suffix, model", "recursion", LEARNED),
                ("lookup, exit, model", "recursion", AT_RANDOM),
                ("two models", "fixed schedule", LEARNED),
                *((name, "fixed schedule", AT_RANDOM) for name in ("two models", "head, model")),
                ("suffix", "fixed schedule", AT_RANDOM),
            )
        ),
    ],
)
def test_a_crowded_engine_loses_nothing(name, how, drafts, request, family, crowded_plain):
    """Preemption, prefix hits, requests that sit a step out, texts up to max_model_len."""
    if how != "recursion":
        request.getfixturevalue("as_on_gpus")
    config = {**configuration(name, family), "adaptive": drafts != ALWAYS}
    engine = {"model": family.target, **CROWDED, "speculative_config": config}
    results = run_engine(engine, CROWDED_JOBS, patch=PATCHES.get((how, drafts)))
    assert {job: ids(result) for job, result in results.items()} == crowded_plain
    checked = results.values() if drafts == ALWAYS else [results["preempted"]]
    for result in checked:
        levels, accepted = result["levels"], result["counters"]["spec_decode_num_accepted_tokens"]
        if how != "recursion" or drafts == ALWAYS:
            # Else any level may draft for the target.
            assert levels[-1]["accepted"] == accepted
        assert accepted > 0 or drafts == LEARNED
        assert all(0 <= level["accepted"] <= level["drafted"] for level in levels)
    if how != "recursion" and drafts != ALWAYS:
        return
    assert results["preempted"]["counters"]["num_preemptions"] > 0
    # Below a head vLLM computes the last block of a prefix again, and here there is one.
    hits = results["prefix hits"]["counters"]["prefix_cache_hits"]
    assert (hits > 0) != ("head" in name)


@functools.cache
def loaded(path: str):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def greedy(path: str, prompt: list[int], count: int) -> list[int]:
    """What a model writes after a prompt."""
    found = loaded(path).generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return found[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("patch", ["install", "install+leave_unread"])
def test_passes_are_skipped_while_a_lookup_wins(patch, as_on_gpus, family, tmp_path):
    """Up to the end of the stored text, where the model drafts as it does alone; a control not."""
    prompt, stored, store = PROMPTS[1], 110, str(tmp_path / "text.safetensors")
    text = greedy(family.target, prompt, stored + 40)
    known = np.array([*prompt, *text[:stored]])
    write_store(collect_texts([known], family.vocabulary), store)
    sources = [{"suffix": {"min_acceptance": 0.01, "store": store}}, {"model": family.mid}]
    config = cascade([{"sources": sources}])
    engine = {"model": family.target, "max_num_seqs": 1, "speculative_config": config}
    jobs = {"": {"prompts": [prompt], "params": {**GREEDY, "max_tokens": len(text)}}}
    patched = f"support.skipped_passes:{patch}"
    found = run_engine(engine, jobs, patch=patched, work=skipped_passes.run)[""]
    assert ids(found) == [text]
    before, after = [], []
    for step in found["steps"]:
        (after if step[1] > len(prompt) + stored + 5 else before).append(step)
    assert sum(not whole for whole, *_ in before) > len(before) / 2
    assert patch == "install+leave_unread" or sum(whole for whole, *_ in after) > len(after) / 2
    alike = [
        draft == greedy(family.mid, [*prompt, *text][:length], len(draft))
        for _, length, drawn, draft in after
        if drawn
    ]
    assert len(alike) > 2 and all(alike) == (patch == "install")


@pytest.mark.slow
def test_a_head_drafts_alike_whether_its_passes_were_skipped(as_on_gpus, family):
    """Its first pass reads the target's states; here no lookup offers anything."""
    sources = [{"ngram": {"min": 9, "max": 9}}, {"eagle3": head(family)}]
    levels = [{"sources": sources, "min_acceptance": 0.0}]
    engine = {"model": family.target, "speculative_config": cascade(levels)}
    jobs = {"": {"prompts": PROMPTS[1:2], "params": {**GREEDY, "max_tokens": 16}}}
    found = [
        run_engine(engine, jobs, patch=f"support.skipped_passes:{patch}", work=skipped_passes.run)
        for patch in ("install_turns", "install_all")
    ]
    in_turns, whole = (result[""]["steps"] for result in found)
    assert ids(found[0][""]) == ids(found[1][""])
    assert [every for every, *_ in in_turns] == [i % 3 == 2 for i in range(len(in_turns))]
    after = {length: draft for _, length, _, draft in whole}
    assert all(len(draft) == 4 for draft in after.values())
    for every, length, drawn, draft in in_turns:
        assert drawn and draft == after[length][: len(draft)] and len(draft) == (4 if every else 1)


def remembering(llm, jobs: dict) -> dict:
    """The jobs, of which each request goes on with the thresholds of the one before."""
    with mock.patch.object(DeviceThresholds, "forget"):
        return run_jobs(llm, jobs)


def test_a_slot_that_is_used_again_remembers_nothing(family):
    """Drafts that end by entropy are those of a request alone; with a negative control."""
    params = {**GREEDY, "max_tokens": 40}
    alone = {"alone": {"prompts": PROMPTS[3:], "params": params}}
    after = {"before": {"prompts": PROMPTS[:3], "params": params}, **alone}
    config = configuration("entropy", family)
    engine = {"model": family.target, "max_num_seqs": 1, "speculative_config": config}
    works = (alone, run_jobs), (after, run_jobs), (after, remembering)
    found = [run_engine(engine, jobs, work=work)["alone"] for jobs, work in works]
    drafted = [[(level["drafted"], level["accepted"]) for level in f["levels"]] for f in found]
    assert drafted[0] == drafted[1] != drafted[2]
    assert ids(found[0]) == ids(found[1]) == ids(found[2])


@pytest.mark.parametrize("patch", ["install", "install+leave_unread"])
def test_levels_have_read_every_step(patch, as_on_gpus, family):
    """Also those in which nothing pays, by CUDA graphs, or a target would reject its own drafts."""
    params = {"temperature": 1, "max_tokens": 60, "ignore_eos": True}
    engine = {"model": family.target, "max_num_seqs": 4, "max_model_len": 128}
    engine["speculative_config"] = {**cascade([{"model": family.target}]), "adaptive": True}
    jobs = {"": {"prompts": PROMPTS, "params": params}}
    found = run_engine(engine, jobs, patch=f"support.steps_without_drafts:{patch}")[""]
    accepted, drafted = (
        found["counters"][f"spec_decode_num_{each}_tokens"] for each in ("accepted", "draft")
    )
    assert drafted > 50 and (accepted == drafted) == (patch == "install")


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
    jobs = {name: {"prompts": each, "params": GREEDY} for name, each in prompts.items()}
    engine = {"model": family.target, "max_num_seqs": 2, "speculative_config": cascade([level])}
    results = run_engine(engine, jobs).values()
    assert [ids(result)[0] for result in results] == [greedy_tokens[1]] * 3
    counts = [result["counters"]["spec_decode_num_accepted_tokens"] for result in results]
    if shared:
        assert counts[0] < 4 <= counts[1] and counts[2] >= 5
    else:
        assert counts[0] == counts[1] < 4
