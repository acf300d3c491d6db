"""Features that need a tokenizer: stop strings, bad words, end of text, structured output."""

import json
import re

import pytest
from support.engines import differing, run_engine
from support.level_files import cascade
from support.odd_requests import EOS, LETTERS, TOKENIZER
from support.soak_requests import CHOICES, PATTERN, SCHEMA

PROMPTS = [TOKENIZER.encode(text) for text in ("abc", "def fed", "a cab a bed", "0123", "{", "cdc")]
GREEDY = {"temperature": 0, "max_tokens": 40}


def structured(**constraint) -> dict:
    return {"structured_outputs": constraint, "max_tokens": 40}


WORDS = {**GREEDY, "allowed_token_ids": LETTERS}
KEPT = {"include_stop_str_in_output": True, "min_tokens": 5}
PARAMS = {
    "stop strings": {**WORDS, "stop": ["ab", "c", "fe", "dd"]},
    "stop strings kept": {**WORDS, "stop": ["ab", "ff"], **KEPT},
    "bad words": {**WORDS, "bad_words": ["a", "bc", "dd"]},
    "end of text": {**GREEDY, "logit_bias": {EOS: 5.0}},
    "end of text after min_tokens": {**GREEDY, "logit_bias": {EOS: 9.0}, "min_tokens": 7},
    "choice": {**structured(choice=CHOICES), "temperature": 0},
    "regex": {**structured(regex=PATTERN), "temperature": 0},
    "json": {**structured(json=SCHEMA), "temperature": 0},
    "with and without grammar": [GREEDY, {**structured(regex=PATTERN), "temperature": 0}] * 3,
}
JOBS = {name: {"prompts": PROMPTS, "params": params} for name, params in PARAMS.items()}
JOBS["sampled json"] = {
    "prompts": PROMPTS * 4,
    "params": [{**structured(json=SCHEMA), "seed": i} for i in range(4 * len(PROMPTS))],
}
TEXT = {
    "skip_tokenizer_init": False,
    # Random models would fill their JSON with blanks.
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}


@pytest.fixture(scope="module")
def plain(text_family):
    return run_engine({"model": text_family.target, **TEXT}, JOBS)


@pytest.fixture(scope="module")
def speculated(text_family):
    top = {"model": text_family.mid, "temperature_scale": 0.4}
    levels = cascade({"model": text_family.small, "num_tokens": 3}, top, num_speculative_tokens=6)
    return run_engine({"model": text_family.target, **TEXT, **levels}, JOBS)


@pytest.mark.parametrize("job", [job for job in JOBS if job != "sampled json"])
def test_greedy_text_equals_no_speculation(plain, speculated, job):
    assert differing({job: speculated[job]}, plain) == []


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
