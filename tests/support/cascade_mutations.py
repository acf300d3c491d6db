"""Random changes to cascades, and what a message about one must look like."""

import copy
import random
import re
from typing import Any

from support import cascade_rules
from support.cascade_rules import valid_cascade

LONGEST_MESSAGE = 500
# Whatever the user sent is marked with Q, so that a quote can be measured.
LONGEST_QUOTE = 200
SENTENCE = re.compile(
    r"(speculative_config|method 'hsd'|'cascade'|cascade|levels|num_speculative_tokens|verifier|"
    r"horizontal_tokens|adaptive)(?!\w).*\.",
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
    cascade_rules.KIND_KEYS
    | cascade_rules.SAMPLING_KEYS
    | cascade_rules.VLLM_KEYS
    | cascade_rules.TOP_KEYS
    | cascade_rules.SUFFIX_KEYS
    | {"cascade", "max", "min", "rounds", "window", "tail", "levls", "Q" * 500, ""}
)
NOT_TEXT = [1, None, True, ("Q",), b"Q", 2.5]


def mutated(rng: random.Random, raw: dict) -> Any:
    """The cascade after one to three random changes, anywhere in it."""
    raw = copy.deepcopy(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        change = rng.choice(CHANGES)
        change(rng, raw)
    return _junk(rng) if rng.random() < 0.02 else raw


def _junk(rng: random.Random) -> Any:
    """A value of JUNK that later changes may change, too."""
    value = rng.choice(JUNK)
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list) and len(value) < 20:
        return [dict(item) if isinstance(item, dict) else item for item in value]
    return value


def _mappings(raw: dict) -> list[dict]:
    levels = raw.get("levels")
    found = [raw]
    for level in levels if isinstance(levels, list) and len(levels) < 20 else []:
        if isinstance(level, dict):
            found.append(level)
            found += [value for value in level.values() if isinstance(value, dict)]
            sources = level.get("first_of")
            for source in sources if isinstance(sources, list) and len(sources) < 20 else []:
                if isinstance(source, dict):
                    found += [source, *(v for v in source.values() if isinstance(v, dict))]
    return found


def _replace(rng: random.Random, raw: dict) -> None:
    mapping = rng.choice(_mappings(raw))
    if mapping:
        mapping[rng.choice(list(mapping))] = _junk(rng)


def _remove(rng: random.Random, raw: dict) -> None:
    mapping = rng.choice(_mappings(raw))
    if mapping:
        del mapping[rng.choice(list(mapping))]


def _add(rng: random.Random, raw: dict) -> None:
    rng.choice(_mappings(raw))[rng.choice(NAMES)] = _junk(rng)


def _dashes(rng: random.Random, raw: dict) -> None:
    mapping = rng.choice(_mappings(raw))
    for key in [key for key in mapping if isinstance(key, str)]:
        mapping[key.replace("_", "-")] = mapping.pop(key)


def _repeat(rng: random.Random, raw: dict) -> None:
    mapping = rng.choice(_mappings(raw))
    for key in [key for key in mapping if isinstance(key, str) and "_" in key][:1]:
        mapping[key.replace("_", "-")] = mapping[key]


def _not_text(rng: random.Random, raw: dict) -> None:
    rng.choice(_mappings(raw))[rng.choice(NOT_TEXT)] = _junk(rng)


def _lengths(rng: random.Random, raw: dict) -> None:
    mapping = rng.choice(_mappings(raw))
    keys = [key for key in mapping if isinstance(key, str) and key.endswith("tokens")]
    if keys:
        mapping[rng.choice(keys)] = rng.choice([True, *range(8)])


def _levels(rng: random.Random, raw: dict) -> None:
    levels = raw.get("levels")
    if not isinstance(levels, list) or not 0 < len(levels) < 20:
        return
    change = rng.choice(["shuffle", "drop", "repeat", "junk"])
    if change == "shuffle":
        rng.shuffle(levels)
    elif change == "drop":
        levels.pop(rng.randrange(len(levels)))
    elif change == "repeat":
        level = rng.choice(levels)
        levels.append(dict(level) if isinstance(level, dict) else level)
    else:
        levels[rng.randrange(len(levels))] = _junk(rng)


def _adapt(rng: random.Random, raw: dict) -> None:
    raw["adaptive"] = rng.choice(
        [True, True, False, 1, "true", {}, {"profile": "p.json"}, {"profile": ""}, {"depth": 1}]
    )


def _sources(rng: random.Random, raw: dict) -> None:
    """Reorder, repeat, nest or empty the sources of a level."""
    lists = [m["first_of"] for m in _mappings(raw) if isinstance(m.get("first_of"), list)]
    lists = [found for found in lists if 0 < len(found) < 20]
    if not lists:
        return
    sources = rng.choice(lists)
    change = rng.choice(["shuffle", "drop", "repeat", "nest", "junk"])
    if change == "shuffle":
        rng.shuffle(sources)
    elif change == "drop":
        sources.pop()
    elif change == "repeat":
        sources[:0] = [dict(sources[0]) if isinstance(sources[0], dict) else sources[0]]
    elif change == "nest":
        sources[-1] = {"first_of": [{"ngram": {}}]}
    else:
        sources[rng.randrange(len(sources))] = _junk(rng)


CHANGES = [
    *(_replace, _remove, _add, _dashes, _repeat, _not_text, _lengths, _levels),
    *(_adapt, _sources),
]


def cascades(seed: int, count: int) -> list[Any]:
    """Every fifth cascade is left as it was drawn, the others are mutated."""
    rng = random.Random(seed)
    lookups = {
        "ngram": {"max": 3},
        "suffix": {"store": "t.safetensors", "shared_tokens": 9},
        "bigram": "t.npz",
        "ngram_model": "t.safetensors",
        "early_exit": 2,
        "exit_head": "heads",
        "eagle3": "eagle3",
    }
    found = []
    for i in range(count):
        raw = valid_cascade(rng, ["small", "mid"], lookups)
        found.append(raw if i % 5 == 0 else mutated(rng, raw))
    return found


def sentence_objection(message: str) -> str | None:
    """What keeps a message from being one short sentence that begins with a key."""
    if "\n" in message or not SENTENCE.fullmatch(message):
        return f"is not a sentence about a key: {message[:300]!r}"
    if len(message) > LONGEST_MESSAGE or message.count("Q") > LONGEST_QUOTE:
        return f"says {len(message)} characters, {message.count('Q')} of them quoted"
    return None
