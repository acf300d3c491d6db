"""Mutated configurations: each is accepted as it was given, or refused in one sentence.

What is valid stands in the tables of `core/test_config.py`. The harness is itself tested on parsers
with a known fault.
"""

from collections.abc import Callable
from typing import Any

import pytest
from support.cascade_mutations import cascades, sentence_objection, valid_cascades

from vllm_hsd.config import CascadeConfig
from vllm_hsd.errors import UserError
from vllm_hsd.levels.base import LevelConfig, with_underscores

MUTATIONS = 4000
VALID = valid_cascades("small", "mid", "store", "heads", "eagle3")


def changes_values(level: LevelConfig, raw: dict) -> bool:
    given = with_underscores(raw)
    kept = {key: getattr(level, key, None) for key in given.keys() - {level.kind, "verifier"}}
    return level.kind not in given or kept != {key: given[key] for key in kept}


def objection(parse: Callable[[Any], Any], raw: Any) -> str | None:
    """What is wrong with the answer of a parser, None if nothing is."""
    try:
        parsed = parse(raw)
    except UserError as error:
        if any(raw is valid for valid in VALID):
            return f"refuses what is valid: {error}"
        return sentence_objection(str(error))
    except Exception as error:
        return f"raises {type(error).__name__}"
    keys = with_underscores(raw)
    if parsed.num_speculative_tokens is not keys["num_speculative_tokens"]:
        return "changes values"
    for level, given in zip(parsed.levels, keys["levels"], strict=True):
        if changes_values(level, given):
            return "changes values"
    return None


def objections(parse: Callable[[Any], object]) -> list[str]:
    raws = cascades(VALID, seed=0, count=MUTATIONS)
    return [said for raw in raws if (said := objection(parse, raw))]


def test_every_mutation_is_accepted_or_gets_one_sentence():
    assert objections(CascadeConfig.parse) == []


def _true_is_one(raw: Any) -> object:
    if isinstance(raw, dict):
        raw = {key: int(value) if value is True else value for key, value in raw.items()}
    return CascadeConfig.parse(raw)


def _drops_levels(raw: Any) -> object:
    parsed = CascadeConfig.parse(raw)
    return parsed.model_copy(update={"levels": parsed.levels[::-1]})


def _echoes(raw: Any) -> object:
    try:
        return CascadeConfig.parse(raw)
    except UserError as error:
        raise UserError(f"{str(error)[:-1]} ({raw!r:.9000}).") from None


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
    _ = raw["levels"] if isinstance(raw, dict) else None
    return CascadeConfig.parse(raw)


BROKEN = {
    "changes values": [_true_is_one, _drops_levels],
    "says ": [_echoes],
    "refuses what is valid": [_refuses_dashes],
    "is not a sentence": [_names_no_key],
    "raises KeyError": [_looks_up_without_asking],
}


@pytest.mark.parametrize(
    ("said", "parse"), [(said, parse) for said, parsers in BROKEN.items() for parse in parsers]
)
def test_the_harness_catches_a_broken_parser(said, parse):
    assert any(objection.startswith(said) for objection in objections(parse))
