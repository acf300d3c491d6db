"""Greedy and seeded texts are those of vLLM without speculation, whatever is drafted, and how."""

import pytest
import torch
from support.cascades import DRAWN, configuration, stock
from support.engines import alike, differing, ids, run_engine
from support.level_files import EVERY_KIND, LevelFiles, cascade, every_kind, write_level_files
from support.marks import slow_but
from transformers import AutoModelForCausalLM

COUNT, EOS = 12, 1
# Some prompts begin with the same block of the cache.
SHARED = [(j * j) % 60 + 2 for j in range(64)]
PROMPTS = [
    [*SHARED[: 32 * (i % 3)], *((7 * i + j * j) % 60 + 2 for j in range(9 + 5 * i))]
    for i in range(COUNT)
]
VARIED = [
    {"temperature": 0.2},  # repeats itself: lookups are accepted
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1, "temperature": 0.3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"logit_bias": {3: 2.0}, "logprobs": 2},
    {"min_tokens": 12, "ignore_eos": False, "logit_bias": {EOS: 4.0}},
    {"bad_words_ids": [[2], [3, 3]], "allowed_token_ids": list(range(40))},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"stop_token_ids": [5, 6, 7]},
    {"max_tokens": 3},
    {"max_tokens": 1},
]
SEEDED = [
    {"max_tokens": 30, "ignore_eos": True, "temperature": 0.7 + 0.1 * (i % 6), "seed": 100 + i, **p}
    for i, p in enumerate(VARIED)
]
# Of each of the processors above, too.
GREEDY = [{**given, "temperature": 0} for given in SEEDED]
# Some tokens are left before max_model_len, 256.
FULL = [[(7 * i + j * j) % 60 + 2 for j in range(226 + 5 * i)] for i in range(3)]
OTHERS = [{"max_tokens": 30, "ignore_eos": True, "temperature": i} for i in range(2)]
MIXED = {"prompts": PROMPTS + PROMPTS[:2], "params": SEEDED + OTHERS}
# Hot enough that no two texts agree by chance.
UNSEEDED = {"temperature": 1.0, "seed": None}
SEVERAL = {"max_tokens": 12, "ignore_eos": True, "n": 3}
JOBS = {
    **{f"alone {i}": {"prompts": [PROMPTS[i]], "params": SEEDED[i]} for i in (0, 4)},
    "four": {"prompts": PROMPTS[:4], "params": SEEDED[:4]},
    "twelve and others, prefix hits": MIXED,
    "join and leave": {**MIXED, "arrive": [0, 3, 5, 6, 6, 9, 1, 2, 11, 4, 4, 8, 0, 7]},
    "several": {"prompts": PROMPTS[:4], "params": {**SEVERAL, "seed": 5}},
    "no seeds": {"prompts": [PROMPTS[0]] * 4, "params": {**SEEDED[0], **UNSEEDED}},
    "greedy": {"prompts": PROMPTS, "params": GREEDY},
    "aborted": {
        "prompts": PROMPTS,
        "params": GREEDY[0],
        "arrive": [i % 5 for i in range(COUNT)],
        "abort": {i: 4 + i for i in range(0, COUNT, 3)},
    },
    "few tokens": {
        "prompts": PROMPTS,
        "params": [{**GREEDY[0], "max_tokens": 1 + i % 4} for i in range(COUNT)],
    },
    "prompt logprobs": {
        "prompts": PROMPTS[:4],
        "params": [{**GREEDY[0], "prompt_logprobs": 2 * (i % 2), "logprobs": 2} for i in range(4)],
    },
    "max_model_len": {"prompts": FULL, "params": {**GREEDY[0], "max_tokens": 400}},
}
SHAPES = {
    "whole": {"block_size": 32},
    # Twelve requests of 5 drafts + 1 token just fit: the scheduler cuts prompts, not drafts.
    "in chunks": {"block_size": 32, "max_num_batched_tokens": 72, "max_num_seqs": 12},
    "preempted": {"block_size": 32, "num_gpu_blocks_override": 14},
}
KINDS = (*EVERY_KIND, "three")
FAST = [("three", "whole", False), ("eagle3", "in chunks", False), ("sources", "preempted", True)]
FAST += [("draft_model", "whole")]  # under stock drafters
CASES = [(c, s, a) for c in KINDS for s in SHAPES for a in (True, False)]


@pytest.fixture(scope="module")
def files(family, tmp_path_factory) -> LevelFiles:
    return write_level_files(family.target, tmp_path_factory.mktemp("files"), 64, trained=True)


def levels(name: str, family, files: LevelFiles) -> list[dict]:
    """The smallest cascade with a kind of level, or one of three levels."""
    kinds = every_kind(family, files)
    if name != "three":
        return [kinds[name]]
    return [
        {**kinds["sources"], "num_tokens": 2},
        {**kinds["exit_head"], "num_tokens": 3, "temperature_scale": 1.3},
        {"model": family.mid, "verifier": "standard"},
    ]


@pytest.fixture(scope="module")
def plain(family) -> dict:
    found = run_engine({"model": family.target}, JOBS)
    assert any(output["stop"] for [output] in found["greedy"]["outputs"])
    full = zip(FULL, ids(found["max_model_len"]), strict=True)
    assert all(len(prompt) + len(text) == 256 for prompt, text in full)
    return found


def wrong(results: dict, plain: dict) -> set[str]:
    """Jobs with an output that is not plain vLLM's, but for those sampled without a seed."""
    certain = {name: result for name, result in results.items() if name != "no seeds"}
    found = {name for name, i in differing(certain, plain) if i != COUNT + 1}
    key = "prompt_logprobs"
    return found | {n for n in certain if not alike(results[n][key], plain[n][key], 1e-3)}


@pytest.mark.parametrize(("name", "shape", "adaptive"), slow_but(FAST, CASES))
def test_texts_are_those_of_vllm_without_speculation(family, files, plain, name, shape, adaptive):
    own = levels(name, family, files)
    if adaptive:
        # Which refuses levels of unequal scales.
        own = [{k: v for k, v in each.items() if k != "temperature_scale"} for each in own]
    engine = cascade(*own, adaptive=adaptive)
    results = run_engine({"model": family.target, **SHAPES[shape], **engine}, JOBS)
    assert not wrong(results, plain)
    counters = [result["counters"] for result in results.values()]
    preempted, hits, accepted = (
        sum(each[name] for each in counters)
        for name in ("num_preemptions", "prefix_cache_hits", "spec_decode_num_accepted_tokens")
    )
    assert (preempted > 0) == (shape == "preempted") and hits > 0
    assert accepted > 0 or adaptive  # which may find that no draft pays
    assert len(set(map(tuple, ids(results["no seeds"])))) == 4
    # Requests of one or two tokens draft nothing, of three tokens one, of four at most two and one.
    few = results["few tokens"]["levels"] or [{"drafted": 0}]
    assert few[-1]["drafted"] <= 3 * 1 + 3 * 3


# Few blocks, and tokens for few drafts; above four requests a recorded graph takes long.
CROWDED = {"block_size": 32, "num_gpu_blocks_override": 10}
CROWDED |= {"max_num_batched_tokens": 24, "max_num_seqs": 4}
# Draft lengths of a batch that change at random, and proposals by recorded graphs.
PATCHES = {
    "passes": None,
    "lengths at random": "support.adversarial_depth:install_for_batches",
    "graphs": "support.recorded_graph:serve",
}
CASCADES = ("suffix, model", "two models", "sources, model", "choice, model", "head, model")
CASCADES += ("choice with a head, model", "lookup, exit, model")
ON_GPUS = [(name, how) for name in CASCADES for how in ("passes", "graphs")]
ON_GPUS += [(name, "lengths at random") for name in ("suffix", "two models", "head, model")]


@pytest.mark.parametrize(("name", "how"), slow_but(ON_GPUS[:1], ON_GPUS))
def test_fixed_schedules_change_no_text(as_on_gpus, family, plain, name, how):
    """Preempted, with prompts in chunks and requests that sit a step out."""
    config = {**configuration(name, family), "adaptive": how == "lengths at random"}
    jobs = {job: JOBS[job] for job in ("join and leave", "greedy", "max_model_len")}
    engine = {"model": family.target, **CROWDED, "speculative_config": config}
    results = run_engine(engine, jobs, patch=PATCHES[how])
    assert not wrong(results, plain)
    assert sum(result["counters"]["num_preemptions"] for result in results.values()) > 0
    for result in results.values():
        accepted = result["counters"]["spec_decode_num_accepted_tokens"]
        assert result["levels"][-1]["accepted"] == accepted
    assert any(result["levels"][-1]["accepted"] for result in results.values())


STOCK = [(m, s) for m in ("ngram", "draft_model", "eagle3") for s in SHAPES]


@pytest.mark.parametrize(("method", "shape"), slow_but(FAST, STOCK))
def test_under_stock_drafters_too(family, files, plain, method, shape):
    keys = {
        "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "draft_model": {"model": family.mid, **DRAWN},
        "eagle3": {"model": files.eagle3, **DRAWN},
    }[method]
    speculative = stock(method, **keys)
    engine = {"model": family.target, **SHAPES[shape], "speculative_config": speculative}
    results = run_engine(engine, JOBS)
    assert not wrong(results, plain)
    assert sum(r["counters"]["spec_decode_num_accepted_tokens"] for r in results.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "adaptive"), [("eagle3", False), ("three", False), ("sources", True), ("ngram", False)]
)
def test_prompts_of_embeddings(family, files, name, adaptive):
    """Levels see token ids only, and embeddings have none: poor drafts, the same text."""
    weights = AutoModelForCausalLM.from_pretrained(family.target).model.embed_tokens.weight
    embedded = [{"prompt_embeds": weights[torch.tensor(p)].detach()} for p in PROMPTS[:3]]
    jobs = {
        "embedded": {"prompts": embedded, "params": GREEDY[:3]},
        "mixed": {
            "prompts": [PROMPTS[1], embedded[0], PROMPTS[3], embedded[2]],
            "params": GREEDY[0],
        },
    }
    engine = {"model": family.target, **SHAPES["in chunks"], "enable_prompt_embeds": True}
    speculative = cascade(*levels(name, family, files), adaptive=adaptive)
    assert not wrong(run_engine({**engine, **speculative}, jobs), run_engine(engine, jobs))


def test_a_draw_of_another_position_is_seen(family, files, plain):
    """Negative control: the noise of the next position, and noise that is met twice."""
    engine = {"model": family.target, **cascade(*levels("ngram", family, files))}
    jobs = {name: JOBS[name] for name in ("alone 4", "four", "several")}
    for fault in ("neighbouring_noise", "noise_met_twice"):
        results = run_engine(engine, jobs, patch=f"support.biased_sampler:{fault}")
        assert wrong(results, plain) == set(jobs)
