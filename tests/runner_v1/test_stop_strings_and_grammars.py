"""Features that need a tokenizer: stop strings, bad words, end of text, structured output."""

import itertools
import json
import re

import pytest
from support.engines import run_engine
from support.exact_joint_distribution import chi_square_p_value, distribution_among
from support.level_files import cascade
from support.odd_requests import EOS, LETTERS, TOKENIZER
from support.sampling_cases import SIGNIFICANCE
from support.soak_requests import CHOICES, PATTERN, SCHEMA

PROMPTS = [TOKENIZER.encode(text) for text in ("abc", "def fed", "a cab a bed", "0123", "{", "cdc")]
GREEDY = {"temperature": 0, "max_tokens": 40}


def structured(**constraint) -> dict:
    return {"structured_outputs": constraint, "max_tokens": 40}


# The control below is noticed from 1500 samples on.
SAMPLED_PROMPT, NUM_SAMPLES = PROMPTS[2], 2000

JOBS = {
    "stop strings": {
        "prompts": PROMPTS,
        "params": {**GREEDY, "allowed_token_ids": LETTERS, "stop": ["ab", "c", "fe", "dd"]},
    },
    "stop strings kept": {
        "prompts": PROMPTS,
        "params": {
            **GREEDY,
            "allowed_token_ids": LETTERS,
            "stop": ["ab", "ff"],
            "include_stop_str_in_output": True,
            "min_tokens": 5,
        },
    },
    "bad words": {
        "prompts": PROMPTS,
        "params": {**GREEDY, "allowed_token_ids": LETTERS, "bad_words": ["a", "bc", "dd"]},
    },
    "end of text": {"prompts": PROMPTS, "params": {**GREEDY, "logit_bias": {EOS: 5.0}}},
    "end of text after min_tokens": {
        "prompts": PROMPTS,
        "params": {**GREEDY, "logit_bias": {EOS: 9.0}, "min_tokens": 7},
    },
    "choice": {"prompts": PROMPTS, "params": {**structured(choice=CHOICES), "temperature": 0}},
    "regex": {"prompts": PROMPTS, "params": {**structured(regex=PATTERN), "temperature": 0}},
    "json": {"prompts": PROMPTS, "params": {**structured(json=SCHEMA), "temperature": 0}},
    "with and without grammar": {
        "prompts": PROMPTS,
        "params": [
            {**GREEDY, **(structured(regex=PATTERN) if i % 2 else {})} for i in range(len(PROMPTS))
        ],
    },
    "sampled json": {
        "prompts": PROMPTS * 4,
        "params": [{**structured(json=SCHEMA), "seed": i} for i in range(4 * len(PROMPTS))],
    },
}
# Drafters know the allowed letters but not the grammar, which cuts their drafts anywhere.
CHOICE_SAMPLES = {
    "prompts": [SAMPLED_PROMPT] * NUM_SAMPLES,
    "params": [
        {
            **structured(choice=CHOICES),
            "allowed_token_ids": [*LETTERS, EOS],
            "temperature": 2.0,
        }
        for _ in range(NUM_SAMPLES)
    ],
}
END_SAMPLES = {
    "prompts": [SAMPLED_PROMPT] * NUM_SAMPLES,
    "params": [
        {"max_tokens": 5, "allowed_token_ids": [*LETTERS[:2], EOS]} for _ in range(NUM_SAMPLES)
    ],
}


TEXT = {
    "skip_tokenizer_init": False,
    # Random models would fill their JSON with blanks.
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}


@pytest.fixture(scope="module")
def plain(text_family):
    return run_engine({"model": text_family.target, **TEXT}, JOBS)


def hsd(family) -> dict:
    # Far from the target: otherwise a plain bonus token after a cut is hardly an error.
    top = {"model": family.mid, "temperature_scale": 0.4}
    levels = cascade({"model": family.small, "num_tokens": 3}, top, num_speculative_tokens=6)
    return {"model": family.target, **TEXT, **levels}


@pytest.fixture(scope="module")
def speculated(text_family):
    jobs = {**JOBS, "sampled choices": CHOICE_SAMPLES, "sampled ends": END_SAMPLES}
    return run_engine(hsd(text_family), jobs)


@pytest.mark.parametrize("job", [job for job in JOBS if job != "sampled json"])
def test_greedy_text_equals_no_speculation(plain, speculated, job):
    for expected, got in zip(plain[job]["outputs"], speculated[job]["outputs"], strict=True):
        for key in ("ids", "text", "finish", "stop"):
            assert got[0][key] == expected[0][key]


def test_outputs_obey_their_constraints(speculated):
    outputs = {name: [o[0] for o in speculated[name]["outputs"]] for name in JOBS}
    for name in ("stop strings", "stop strings kept"):
        assert any(isinstance(output["stop"], str) for output in outputs[name])
    for output in outputs["bad words"]:
        assert not re.search("a|bc|dd", output["text"])
    assert any(output["finish"] == "stop" for output in outputs["end of text"])
    assert all(len(output["ids"]) >= 8 for output in outputs["end of text after min_tokens"])
    assert all(output["text"] in CHOICES for output in outputs["choice"])
    assert all(re.fullmatch(PATTERN, output["text"]) for output in outputs["regex"])


def test_sampled_json_is_valid(speculated):
    found = set()
    for output in speculated["sampled json"]["outputs"]:
        value = json.loads(output[0]["text"])
        assert set(value) == {"a", "b"} and value["b"] in ("x", "yy", None)
        found.add(output[0]["text"])
    assert len(found) > 1


def choice_distribution(model: str) -> dict[tuple[int, ...], float]:
    ends = [(*TOKENIZER.encode(choice), EOS) for choice in CHOICES]
    return distribution_among(model, SAMPLED_PROMPT, ends, 2.0)


def test_samples_follow_the_target_under_a_grammar(text_family, speculated):
    samples = [tuple(output[0]["ids"]) for output in speculated["sampled choices"]["outputs"]]
    assert chi_square_p_value(samples, choice_distribution(text_family.target)) > SIGNIFICANCE


def test_a_plain_bonus_after_a_refused_token_is_caught(text_family):
    engine, patch = hsd(text_family), "support.biased_sampler:install_plain_bonus"
    more = {key: 2 * value for key, value in CHOICE_SAMPLES.items()}
    outputs = run_engine(engine, {"sampled": more}, patch=patch)["sampled"]["outputs"]
    samples = [tuple(output[0]["ids"]) for output in outputs]
    assert chi_square_p_value(samples, choice_distribution(text_family.target)) < SIGNIFICANCE


def test_samples_follow_the_target_with_an_end_of_text(text_family, speculated):
    letters = LETTERS[:2]
    ended = [(*some, EOS) for n in range(5) for some in itertools.product(letters, repeat=n)]
    outcomes = [*itertools.product(letters, repeat=5), *ended]
    exact = distribution_among(text_family.target, SAMPLED_PROMPT, outcomes, 1.0)
    samples = [tuple(output[0]["ids"]) for output in speculated["sampled ends"]["outputs"]]
    assert len({len(sample) for sample in samples}) > 1
    assert chi_square_p_value(samples, exact) > SIGNIFICANCE
