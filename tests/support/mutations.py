"""Random changes to nested values, and what a message about a cascade must look like."""

import copy
import random
import re
from typing import Any

from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.levels import KINDS

LONGEST_MESSAGE = 500
# Whatever the user sent is marked with Q, so that a quote can be measured.
LONGEST_QUOTE = 200
SENTENCE = re.compile(
    r"(speculative_config|method 'hsd'|'cascade'|cascade|levels|num_speculative_tokens|verifier|"
    r"horizontal_tokens|adaptive|enable_adaptive_verification|untested|disable_by_batch_size)(?!\w).*\.",
)


def _nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def _circular() -> list:
    value: list = []
    value.append(value)
    return value


JUNK = [
    *(None, True, False, 0, -1, 1, 2, 3, 5, 16, 17, 128, 129, 10**6000, -(10**6000)),
    *(1.0, 2.5, 1e-320, 0.01, 0.009, 100, 100.5, float("nan"), float("inf"), -0.0),
    *("", "Q", "Q" * 100_000, "Q\n" * 50, "\ud800", "block", "hierarchical", "standard"),
    *("fixed", "entropy", "tokenwise", "1", b"Q" * 300),
    *([], {}, [1], ["Q" * 1000], {"max": 2}, {"max": 2, "min": 3}, {"Q": 1}, {1: 2}),
    *([{"model": "m"}], [{"model": "m"}] * 17, [{"model": "m"}] * 100_000, {"model": "m"}),
    *(_nested(100_000), _circular()),
]
NAMES = sorted(
    {key for keys in (*KINDS.values(), CascadeConfig) for key in keys.model_fields}
    | {"cascade", "max", "min", "store", "shared_tokens", "rounds", "levls", "Q" * 500, ""}
)
NOT_TEXT = [1, None, True, ("Q",), b"Q", 2.5]


def mutated(rng: random.Random, value: Any) -> Any:
    """The value after one to three random changes, anywhere in it."""
    value = copy.deepcopy(value)
    places = _places(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        place = rng.choice(places)
        (_change_list if isinstance(place, list) else _change_mapping)(rng, place)
    return rng.choice(JUNK) if rng.random() < 0.02 else value


def _places(value: Any) -> list[list | dict]:
    """It and all lists and mappings inside."""
    inner = value.values() if isinstance(value, dict) else value
    return [value, *(p for v in inner if isinstance(v, dict | list) for p in _places(v))]


def _change_list(rng: random.Random, place: list) -> None:
    change = rng.choice(["shuffle", "drop", "repeat", "junk"])
    if change == "shuffle":
        rng.shuffle(place)
    elif place and change == "drop":
        place.pop(rng.randrange(len(place)))
    elif place and change == "repeat":
        place.insert(rng.randrange(len(place) + 1), copy.copy(rng.choice(place)))
    elif place:
        place[rng.randrange(len(place))] = rng.choice(JUNK)


def _change_mapping(rng: random.Random, place: dict) -> None:
    change = rng.choice(["replace", "remove", "add", "dash", "both", "not text", "length"])
    keys = list(place)
    if change == "add" or not keys:
        place[rng.choice(NAMES)] = rng.choice(JUNK)
    elif change == "not text":
        place[rng.choice(NOT_TEXT)] = rng.choice(JUNK)
    else:
        key = rng.choice(keys)
        if change == "replace":
            place[key] = rng.choice(JUNK)
        elif change == "length":
            place[key] = rng.choice([True, *range(8)])
        else:
            kept = place[key] if change == "both" else place.pop(key)
            if change != "remove" and isinstance(key, str):
                place[key.replace("_", "-")] = kept


def sentence_objection(message: str) -> str | None:
    """What keeps a message from being one short sentence that begins with a key."""
    if "\n" in message or not SENTENCE.fullmatch(message):
        return f"is not a sentence about a key: {message[:300]!r}"
    if len(message) > LONGEST_MESSAGE or message.count("Q") > LONGEST_QUOTE:
        return f"says {len(message)} characters, {message.count('Q')} of them quoted"
    return None
