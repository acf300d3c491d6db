"""Mutated configurations: each is accepted as it was given, or refused in one sentence.

What is valid stands in the tables of `test_config.py`. The harness is itself tested on parsers
with a known fault.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from support.mutations import mutated, sentence_objection

from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.errors import UserError
from vllm_hsd.levels.any_kind import with_underscores
from vllm_hsd.levels.base import LevelConfig

MUTATIONS = 4000
TOP = {"model": "mid"}


def two(lowest: dict, **keys: Any) -> dict[str, Any]:
    levels = [{"num_tokens": 2, **lowest}, TOP]
    return {"num_speculative_tokens": 6, "levels": levels, **keys}


# A cascade for every key and kind.
VALID = [
    two({"model": "small", "stopping": "entropy", "temperature_scale": 0.5, "revision": None}),
    two({"early_exit": 1}, verifier="standard", adaptive=True),
    two({"exit_head": "heads", "num_tokens": 4}, verifier="hierarchical"),
    two({"ngram": {"max": 3}}, horizontal_tokens=3, adaptive=False),
    two({"bigram": "store"}, verifier="coupled"),
    two({"ngram_model": "store", "order": 2}),
    two({"sources": [{"ngram": {}}, {"bigram": "store"}, {"model": "small", "stopping": "fixed"}]}),
    {"num-speculative-tokens": 5, "levels": [{"eagle3": "head", "temperature-scale": 2}]},
    {
        "num_speculative_tokens": 9,
        "levels": [
            {"ngram_model": "store", "num_tokens": 2},
            {"early_exit": 1, "num_tokens": 4, "verifier": "standard", "max_rounds": 2},
            {"early_exit": 2, "num_tokens": 5},
            TOP,
        ],
    },
    {
        "num_speculative_tokens": 4,
        "levels": [
            {
                "sources": [{"suffix": {"store": "store", "shared_tokens": 9}}],
                "min_acceptance": 0.2,
            }
        ],
    },
]


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
    """Of every fifth cascade valid, the others mutated."""
    rng = random.Random(0)
    raws = [
        VALID[i // 5 % len(VALID)] if i % 5 == 0 else mutated(rng, rng.choice(VALID))
        for i in range(MUTATIONS)
    ]
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
