"""Mutated configurations: each is accepted if it is valid, or refused in one sentence.

Validity comes from `support.cascade_rules`, which was written without the parser. The harness is
itself tested on parsers with a known fault.
"""

from collections.abc import Callable
from typing import Any

import pytest
from support import cascade_rules
from support.cascade_mutations import cascades, sentence_objection
from support.cascade_rules import is_valid, plain_keys

from vllm_hsd.config import CascadeConfig
from vllm_hsd.errors import UserError

MUTATIONS = 4000


def objection(parse: Callable[[Any], object], raw: Any) -> str | None:
    """What is wrong with the answer of a parser, None if nothing is."""
    wanted = is_valid(raw)
    try:
        parse(raw)
    except UserError as error:
        message = str(error)
    except Exception as error:
        return f"raises {type(error).__name__}"
    else:
        return None if wanted else "accepts what is not valid"
    if wanted:
        return f"refuses what is valid: {message}"
    return sentence_objection(message)


def objections(parse: Callable[[Any], object], raws: list[Any]) -> list[str]:
    return [said for raw in raws if (said := objection(parse, raw))]


def test_every_mutation_is_accepted_or_gets_one_sentence():
    raws = cascades(seed=0, count=MUTATIONS)
    assert objections(CascadeConfig.parse, raws) == []
    share = sum(map(is_valid, raws)) / MUTATIONS
    assert 0.25 < share < 0.75, "the fuzzer must draw both kinds"


def test_what_is_accepted_holds_the_values_that_were_given():
    for raw in cascades(seed=1, count=400):
        if not is_valid(raw):
            continue
        parsed, keys = CascadeConfig.parse(raw), plain_keys(raw)
        assert parsed.num_speculative_tokens == keys["num_speculative_tokens"]
        for level, given in zip(parsed.levels, map(plain_keys, keys["levels"]), strict=True):
            assert level.kind in given
            for key in given.keys() - {level.kind, "verifier"}:
                assert getattr(level, key) == given[key]


def _last_key_wins(raw: Any) -> object:
    if isinstance(raw, dict) and all(isinstance(key, str) for key in raw):
        raw = {key.replace("-", "_"): value for key, value in raw.items()}
    return CascadeConfig.parse(raw)


def _drops_unknown_keys(raw: Any) -> object:
    if plain_keys(raw):
        raw = {k: v for k, v in raw.items() if k.replace("-", "_") in cascade_rules.TOP_KEYS}
    return CascadeConfig.parse(raw)


def _true_is_one(raw: Any) -> object:
    if isinstance(raw, dict):
        raw = {key: int(value) if value is True else value for key, value in raw.items()}
    return CascadeConfig.parse(raw)


def _without_room_check(raw: Any) -> object:
    try:
        return CascadeConfig.parse(raw)
    except UserError as error:
        if "has room for one token" not in str(error):
            raise
    return None


def _adapts_heads(raw: Any) -> object:
    try:
        return CascadeConfig.parse(raw)
    except UserError as error:
        if "lets the levels of a cascade rest" not in str(error):
            raise
    return None


def _takes_models_before_lookups(raw: Any) -> object:
    try:
        return CascadeConfig.parse(raw)
    except UserError as error:
        if "lookups (ngram, suffix) come first" not in str(error):
            raise
    return None


def _echoes(raw: Any) -> object:
    try:
        return CascadeConfig.parse(raw)
    except UserError as error:
        text = next((v for v in raw.values() if isinstance(v, str)), "") if plain_keys(raw) else ""
        raise UserError(f"{str(error)[:-1]} ({text}).") from None


def _refuses_dashes(raw: Any) -> object:
    if isinstance(raw, dict) and any(isinstance(key, str) and "-" in key for key in raw):
        raise UserError("levels: use underscores.")
    return CascadeConfig.parse(raw)


def _names_no_key(raw: Any) -> object:
    try:
        return CascadeConfig.parse(raw)
    except UserError:
        raise UserError("Input should be a valid integer.") from None


def _looks_up_without_asking(raw: Any) -> object:
    _ = raw["num_speculative_tokens"] if isinstance(raw, dict) else None
    return CascadeConfig.parse(raw)


BROKEN = {
    "accepts what is not valid": [
        _last_key_wins,
        _drops_unknown_keys,
        _true_is_one,
        _without_room_check,
        _adapts_heads,
        _takes_models_before_lookups,
    ],
    "says ": [_echoes],
    "refuses what is valid": [_refuses_dashes],
    "is not a sentence": [_names_no_key],
    "raises KeyError": [_looks_up_without_asking],
}


@pytest.mark.parametrize(
    ("said", "parse"), [(said, parse) for said, parsers in BROKEN.items() for parse in parsers]
)
def test_the_harness_catches_a_broken_parser(said, parse):
    found = objections(parse, cascades(seed=0, count=MUTATIONS))
    assert any(objection.startswith(said) for objection in found)
