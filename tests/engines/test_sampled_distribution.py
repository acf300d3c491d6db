"""Sampled tokens follow the target's distribution: chi-square against the exact joint one."""

import pytest
from support.engines import run_engine
from support.level_files import cascade
from support.sampling_cases import CASES, LONG_CASES, SIGNIFICANCE, p_values, sampling_job


def model_levels(family, count: int, **keys) -> dict:
    """The `count` largest drafters of a family, in a cascade."""
    levels = [{"model": family.small, "num_tokens": 2}, {"model": family.mid}]
    return cascade(*levels[-count:], num_speculative_tokens=4, **keys)


PREEMPTING = "two drafters, few tokens and KV blocks"
# The scheduler cuts drafts and preempts requests.
CROWDED = {"max_num_seqs": 48, "max_num_batched_tokens": 150}
CROWDED |= {"block_size": 32, "num_gpu_blocks_override": 14}
ENGINES = {
    "one drafter, block": lambda family: model_levels(family, 1),
    "one drafter, standard": lambda family: model_levels(family, 1, verifier="standard"),
    "two drafters, block": lambda family: model_levels(family, 2),
    "two drafters, standard": lambda family: model_levels(family, 2, verifier="standard"),
    "two drafters, coupled": lambda family: model_levels(family, 2, verifier="coupled"),
    PREEMPTING: lambda family: {**model_levels(family, 2), **CROWDED},
    "every kind of level": lambda family: cascade(
        {"ngram": {"max": 2}, "num_tokens": 2},
        {"early_exit": 1, "num_tokens": 3, "temperature_scale": 1.2},
        {"model": family.mid, "stopping": "entropy", "max_rounds": 2},
        num_speculative_tokens=5,
        horizontal_tokens=1,
    ),
}


# With them the fast form has either verifier, one drafter and two, and every sampling parameter.
FAST = [name for name in ENGINES if name not in ("one drafter, standard", "two drafters, block")]


SLOW = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.mark.parametrize(
    ("engine", "count"),
    [(engine, 150 if engine == PREEMPTING else 250) for engine in FAST]
    + [pytest.param(engine, 20000, marks=SLOW) for engine in ENGINES],
)
def test_samples_follow_the_target(small_vocabulary, engine, count):
    arguments = {"model": small_vocabulary.target, **ENGINES[engine](small_vocabulary)}
    preempting = engine == PREEMPTING
    cases = LONG_CASES if preempting else CASES
    result = run_engine(arguments, {"sampled": sampling_job(cases, count)})["sampled"]
    for level in result["levels"]:
        assert 0.1 < level["accepted"] / level["drafted"] < 0.95
    assert (result["counters"]["num_preemptions"] > 0) == preempting
    found = p_values(small_vocabulary.target, cases, result)
    assert min(found.values()) > SIGNIFICANCE, found


def test_an_uncapped_final_ratio_is_caught(small_vocabulary):
    """Negative control: the published code's fault, on 4000 samples of one case."""
    arguments = {"model": small_vocabulary.target, **model_levels(small_vocabulary, 1)}
    cases = {"temperature 0.7": CASES["temperature 0.7"]}
    patch = "support.biased_sampler:no_cap"
    result = run_engine(arguments, {"sampled": sampling_job(cases, 4000)}, patch=patch)["sampled"]
    found = p_values(small_vocabulary.target, cases, result)
    assert min(found.values()) < SIGNIFICANCE, found
