"""Sampled tokens follow the target's law: chi-square against the exact joint law.

A right sampler fails one comparison with probability ERROR; nearly all requests are seeded, so that
results repeat. The negative control shows what the comparison finds at the smaller sample size.
"""

import functools

import pytest
from support.engines import run_engine
from support.exact_joint_distribution import chi_square, joint_distribution
from support.tiny_models import EOS

ERROR = 1e-6
MAX_TOKENS, COMPARED = 6, 4

CASES = {
    "temperature 0.7": ([2, 3, 0], {"temperature": 0.7}),
    "temperature 1": ([3], {}),
    "temperature 1.3 with eos": ([4, 2], {"temperature": 1.3, "ignore_eos": False}),
    "top_k": ([2, 4, 4, 0, 3, 3], {"top_k": 3, "temperature": 1.3}),
    "top_p": ([0, 3], {"top_p": 0.8}),
    "min_p": ([3, 3, 2], {"min_p": 0.15}),
    "penalties": (
        [4, 4, 3],
        {"repetition_penalty": 1.4, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    ),
    "bias and eos": (
        [2, 2, 4, 3],
        {"logit_bias": {2: 1.0}, "min_tokens": 2, "ignore_eos": False, "top_p": 0.95},
    ),
    "bad words": ([3, 0, 0, 4], {"bad_words_ids": [[2], [3, 3]], "allowed_token_ids": [0, 2, 3]}),
    "without a seed": ([0, 4, 2], {"temperature": 0.9, "seed": None}),
    "greedy": ([3, 2], {"temperature": 0}),
}

# These cross the border of a block while they are decoded.
LONG_CASES = {
    f"{name}, long prompt": ([i * i % 5 for i in range(26)], CASES[name][1])
    for name in ("temperature 0.7", "top_p", "penalties")
}


def of_models(family, drafters: int, **keys) -> dict:
    levels = [{"model": family.small, "num_tokens": 2}, {"model": family.mid}]
    cascade = {"num_speculative_tokens": 4, "levels": levels[-drafters:], **keys}
    return {"speculative_config": {"method": "hsd", **cascade}}


ENGINES = {
    "one drafter, hierarchical": lambda family: of_models(family, 1),
    "one drafter, tokenwise": lambda family: of_models(family, 1, verifier="standard"),
    "two drafters, hierarchical": lambda family: of_models(family, 2),
    "two drafters, tokenwise": lambda family: of_models(family, 2, verifier="standard"),
    # The scheduler cuts drafts here, and preempts.
    "two drafters, short of tokens and blocks": lambda family: {
        **of_models(family, 2),
        "max_num_seqs": 48,
        "max_num_batched_tokens": 150,
        "block_size": 32,
        "num_gpu_blocks_override": 14,
    },
    "every kind of level": lambda family: {
        "speculative_config": {
            "method": "hsd",
            "num_speculative_tokens": 4,
            "horizontal_tokens": 1,
            "levels": [
                {"ngram": {"max": 2}, "num_tokens": 2},
                {"early_exit": 1, "num_tokens": 3, "temperature_scale": 1.2},
                {"model": family.mid, "stopping": "entropy", "max_rounds": 2},
            ],
        }
    },
}


def sampled(engine: dict, count: int, cases=CASES, **kwargs) -> tuple[dict[str, list], dict]:
    """Case -> `count` sampled outputs; the cases share every batch."""
    names = [name for _ in range(count) for name in cases]
    params = [
        {"max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": i, **cases[name][1]}
        for i, name in enumerate(names)
    ]
    job = {"prompts": [cases[name][0] for name in names], "params": params}
    result = run_engine(engine, {"job": job}, **kwargs)["job"]
    outputs: dict[str, list] = {name: [] for name in cases}
    for name, output in zip(names, result["outputs"], strict=True):
        outputs[name].append(tuple(output[0]["ids"]))
    return outputs, result


@functools.cache
def exact(model: str, case: str) -> dict[tuple[int, ...], float]:
    prompt, params = {**CASES, **LONG_CASES}[case]
    return joint_distribution(
        model, prompt, MAX_TOKENS, params, None if params.get("ignore_eos", True) else EOS
    )


def p_values(model: str, outputs: dict[str, list]) -> dict[str, float]:
    """Of the joint law of the first COMPARED tokens, and of the last of them and all behind it."""
    found = {}
    for case, samples in outputs.items():
        for part in (slice(0, COMPARED), slice(COMPARED - 1, None)):
            law: dict[tuple[int, ...], float] = {}
            for outcome, p in exact(model, case).items():
                law[outcome[part]] = law.get(outcome[part], 0.0) + p
            found[f"{case}, from token {part.start}"] = chi_square(
                [output[part] for output in samples], law
            )
    return found


@pytest.mark.parametrize(
    "count", [1000, pytest.param(20000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_joint_law(small_vocabulary, engine, count):
    arguments = {"model": small_vocabulary.target, **ENGINES[engine](small_vocabulary)}
    crowded = engine.endswith("blocks")
    cases = LONG_CASES if crowded else CASES
    outputs, result = sampled(arguments, count, cases)
    for level in result["levels"]:
        assert 0.2 < level["accepted"] / level["drafted"] < 0.95
    assert (result["counters"]["num_preemptions"] > 0) == crowded
    found = p_values(small_vocabulary.target, outputs)
    assert min(found.values()) > ERROR, found


def test_uncapped_final_ratio_is_caught(small_vocabulary):
    arguments = {"model": small_vocabulary.target, **of_models(small_vocabulary, 1)}
    cases = {"temperature 0.7": CASES["temperature 0.7"]}
    patch = "support.biased_sampler:install_uncapped_final_ratio"
    outputs, _ = sampled(arguments, 4000, cases, patch=patch)
    assert min(p_values(small_vocabulary.target, outputs).values()) < ERROR
