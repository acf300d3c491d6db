"""Valid cascades, random changes to them, and what a message about one must look like."""

import copy
import random
import re
from typing import Any

from vllm_hsd.config import CascadeConfig
from vllm_hsd.levels import KINDS

LONGEST_MESSAGE = 500
# Whatever the user sent is marked with Q, so that a quote can be measured.
LONGEST_QUOTE = 200
SENTENCE = re.compile(
    r"(speculative_config|method 'hsd'|'cascade'|cascade|levels|num_speculative_tokens|verifier|"
    r"horizontal_tokens|adaptive|disable_by_batch_size)(?!\w).*\.",
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
            sources = level.get("sources")
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
    raw["adaptive"] = rng.choice([True, True, False, 1, "true", {}])


def _sources(rng: random.Random, raw: dict) -> None:
    """Reorder, repeat, nest or empty the sources of a level."""
    lists = [m["sources"] for m in _mappings(raw) if isinstance(m.get("sources"), list)]
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
        sources[-1] = {"sources": [{"ngram": {}}]}
    else:
        sources[rng.randrange(len(sources))] = _junk(rng)


CHANGES = [
    *(_replace, _remove, _add, _dashes, _repeat, _not_text, _lengths, _levels),
    *(_adapt, _sources),
]


def valid_cascades(
    small: str, mid: str, store: str, exit_head: str, eagle3: str
) -> list[dict[str, Any]]:
    """A cascade for every key and kind, which must be accepted; all but the last can be served by a
    target of two layers.

    Args:
        small, mid: draft models.
        store: of texts.
        exit_head: on the target's first layer.
        eagle3: a head.
    """
    top = {"model": mid}

    def two(lowest: dict, **keys: Any) -> dict[str, Any]:
        levels = [{"num_tokens": 2, **lowest}, top]
        return {"num_speculative_tokens": 6, "levels": levels, **keys}

    return [
        two({"model": small, "stopping": "entropy", "temperature_scale": 0.5, "revision": None}),
        two({"early_exit": 1}, verifier="standard", adaptive=True),
        two({"exit_head": exit_head, "num_tokens": 4}, verifier="hierarchical"),
        two({"ngram": {"max": 3}}, horizontal_tokens=3, adaptive=False),
        two({"bigram": store}, verifier="coupled"),
        two({"ngram_model": store, "order": 2}),
        two({"sources": [{"ngram": {}}, {"bigram": store}, {"model": small, "stopping": "fixed"}]}),
        {"num-speculative-tokens": 5, "levels": [{"eagle3": eagle3, "temperature-scale": 2}]},
        {
            "num_speculative_tokens": 9,
            "levels": [
                {"ngram_model": store, "num_tokens": 2},
                {"early_exit": 1, "num_tokens": 4, "verifier": "standard", "max_rounds": 2},
                {"early_exit": 2, "num_tokens": 5},
                top,
            ],
        },
        {
            "num_speculative_tokens": 4,
            "levels": [
                {
                    "sources": [{"suffix": {"store": store, "shared_tokens": 9}}],
                    "min_acceptance": 0.2,
                }
            ],
        },
    ]


def cascades(valid: list[dict[str, Any]], seed: int, count: int) -> list[Any]:
    """Every fifth cascade is one of `valid`, the others are mutated."""
    rng = random.Random(seed)
    return [
        valid[i // 5 % len(valid)] if i % 5 == 0 else mutated(rng, rng.choice(valid))
        for i in range(count)
    ]


def sentence_objection(message: str) -> str | None:
    """What keeps a message from being one short sentence that begins with a key."""
    if "\n" in message or not SENTENCE.fullmatch(message):
        return f"is not a sentence about a key: {message[:300]!r}"
    if len(message) > LONGEST_MESSAGE or message.count("Q") > LONGEST_QUOTE:
        return f"says {len(message)} characters, {message.count('Q')} of them quoted"
    return None
