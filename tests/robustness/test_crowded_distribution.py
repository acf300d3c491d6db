"""Sampled tokens keep the target's distribution where drafts are cut and requests preempted."""

import itertools

import pytest
from support.engines import run_engine
from support.exact_joint_distribution import chi_square_p_value, distribution_among
from support.level_files import cascade
from support.odd_requests import EOS, LETTERS, TOKENIZER
from support.sampling_cases import SIGNIFICANCE
from support.soak_requests import CHOICES

# The outputs begin in one cache block and end in the next: more requests start than can go on.
PROMPT = TOKENIZER.encode("a cab a bed a bead a cafe aced")[:30]
OUTCOMES = {
    "grammar": [(*TOKENIZER.encode(choice), EOS) for choice in CHOICES],
    "free": [
        *itertools.product(LETTERS[:3], repeat=4),
        *((*some, EOS) for n in range(4) for some in itertools.product(LETTERS[:3], repeat=n)),
    ],
}
PARAMS = {
    "grammar": {
        "structured_outputs": {"choice": CHOICES},
        "allowed_token_ids": [*LETTERS, EOS],
        "temperature": 2.0,
        "max_tokens": 40,
    },
    "free": {"allowed_token_ids": [*LETTERS[:3], EOS], "temperature": 2.0, "max_tokens": 4},
}


def crowded_engine(family) -> dict:
    """Two tokens for most requests of a step, and blocks for half of them."""
    levels = [
        {"model": family.small, "num_tokens": 3},
        {"model": family.mid, "temperature_scale": 0.4},
    ]
    return {
        "model": family.target,
        "skip_tokenizer_init": False,
        "structured_outputs_config": {"backend": "xgrammar"},
        **cascade(*levels, num_speculative_tokens=6),
        "max_model_len": 96,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 48,
        "block_size": 32,
        "num_gpu_blocks_override": 8,
    }


def sample(
    family, count: int, kinds: list[str], patch: str | None = None
) -> tuple[dict[str, list], dict]:
    """Kind of request -> token ids of its outputs, and the result of the job."""
    params = [PARAMS[kind] for _ in range(count) for kind in kinds]
    job = {"prompts": [PROMPT] * len(params), "params": params}
    result = run_engine(crowded_engine(family), {"job": job}, patch=patch)["job"]
    outputs = [tuple(output[0]["ids"]) for output in result["outputs"]]
    return {kind: outputs[i :: len(kinds)] for i, kind in enumerate(kinds)}, result


@pytest.fixture(scope="module")
def exact(text_family) -> dict[str, dict[tuple[int, ...], float]]:
    """Kind of request -> outcome -> probability, in float64."""
    return {
        kind: distribution_among(
            text_family.target, PROMPT, OUTCOMES[kind], PARAMS[kind]["temperature"]
        )
        for kind in PARAMS
    }


@pytest.mark.parametrize(
    "count", [150, pytest.param(2500, marks=[pytest.mark.slow, pytest.mark.timeout(9000)])]
)
def test_crowded_samples_follow_the_target(text_family, exact, count):
    outputs, result = sample(text_family, count, list(PARAMS))
    assert result["counters"]["num_preemptions"] > 5
    for kind in PARAMS:
        assert chi_square_p_value(outputs[kind], exact[kind]) > SIGNIFICANCE, kind


@pytest.mark.slow
@pytest.mark.timeout(9000)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [("install_plain_bonus", "grammar"), ("install_plain_recovery", "free")],
)
def test_a_biased_sampler_is_caught_in_the_crowd(text_family, exact, fault, kind):
    outputs, _ = sample(text_family, 2500, [kind], patch=f"support.biased_sampler:{fault}")
    assert chi_square_p_value(outputs[kind], exact[kind]) < SIGNIFICANCE
