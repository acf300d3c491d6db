"""Changed configurations: each is accepted as it was given, or refused in one sentence.

Keys and values come from the schema; the harness is itself tested on parsers with a known fault.
"""

import copy
import functools
import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.errors import UserError
from vllm_hsd.levels.any_kind import with_underscores
from vllm_hsd.levels.base import LevelConfig

SENTENCE = re.compile(
    r"(speculative_config|method 'hsd'|'cascade'|cascade|levels|num_speculative_tokens|verifier|"
    r"horizontal_tokens|adaptive|enable_adaptive_verification|untested|disable_by_batch_size)(?!\w).*\.",
)
SCHEMA = CascadeConfig.model_json_schema()
PARTS = [SCHEMA, *SCHEMA["$defs"].values()]
PROPERTIES = {key: value for part in PARTS for key, value in part["properties"].items()}
TOP = {"model": "mid"}
SUFFIX = {"suffix": {"store": "store", "shared_tokens": 9}}


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
    two({"bigram_model": "store"}),
    two({"sources": [{"ngram": {}}, {"bigram": "store"}, {"model": "small", "stopping": "fixed"}]}),
    {"num-speculative-tokens": 5, "levels": [{"eagle3": "head", "temperature-scale": 2}]},
    {
        "num_speculative_tokens": 9,
        "levels": [
            {"bigram_model": "store", "num_tokens": 2},
            {"early_exit": 1, "num_tokens": 4, "verifier": "standard", "max_rounds": 2},
            {"early_exit": 2, "num_tokens": 5},
            TOP,
        ],
    },
    {"num_speculative_tokens": 4, "levels": [{"sources": [SUFFIX], "min_acceptance": 0.2}]},
]
NESTED: list = functools.reduce(lambda inner, _: [inner], range(100_000), [])
CIRCULAR: list = []
CIRCULAR.append(CIRCULAR)
HUGE = [10**6000, -(10**6000), "Q" * 100_000, "Q\n" * 50, b"Q" * 300, ["Q" * 1000], {"Q" * 500: 1}]
HUGE += [[{"model": "m"}] * 100_000, NESTED, CIRCULAR, "\ud800"]
FLOATS = [float("nan"), float("inf"), float("-inf"), -0.0, 0.5, 1.0, 2.5, 1e-320, 1e308]
DASHED = [key.replace("_", "-") for key in PROPERTIES]
NAMES = [*PROPERTIES, *DASHED, "cascade", "levls", "", "Q" * 500, 1, ("Q",), b"Q"]


def scalar(draw: random.Random) -> Any:
    signs = (chr(draw.randrange(1 << draw.randrange(17))) for _ in range(draw.randrange(4)))
    number = draw.choice([*FLOATS, *range(-2, 3), draw.randint(3, 130), draw.uniform(-3, 3)])
    return draw.choice([None, False, True, number, "".join(signs)])


def junk(draw: random.Random) -> Any:
    mapping = {draw.choice(NAMES): scalar(draw) for _ in range(draw.randrange(3))}
    return draw.choice([scalar(draw), draw.choice(HUGE), mapping])


def mappings(value: Any) -> list[dict]:
    inner = list(value.values() if isinstance(value, dict) else value)
    found = [p for v in inner if isinstance(v, dict | list) for p in mappings(v)]
    return [value, *found] if isinstance(value, dict) else found


# Key, with underscores -> values that it has in the cascades above.
GIVEN: dict[str, list] = {}
for part in mappings(VALID):
    for key, value in part.items():
        GIVEN.setdefault(key.replace("-", "_"), []).append(value)


def changed(draw: random.Random) -> Any:
    """A valid cascade of which one or two mappings have other keys or values."""
    value = copy.deepcopy(draw.choice(VALID))
    for place in draw.choices(mappings(value), k=draw.choice((1, 2))):
        kept = [None, *place]
        place.pop(draw.choice(kept), None)
        for _ in range(draw.randrange(3)):
            key = draw.choice(draw.choice((kept, NAMES)))
            given = GIVEN.get(str(key).replace("-", "_")) or [junk(draw)]
            place[key] = draw.choice((draw.choice(given), junk(draw)))
    return value


def changes_values(level: LevelConfig, raw: dict) -> bool:
    given = with_underscores(raw)
    kept = {key: getattr(level, key, None) for key in given.keys() - {level.kind, "verifier"}}
    return level.kind not in given or kept != {key: given[key] for key in kept}


def objection(parse: Callable[[Any], Any], raw: Any) -> str | None:
    """What is wrong with the answer of a parser, None if nothing is."""
    try:
        parsed = parse(raw)
    except UserError as error:
        message = str(error)
        if any(raw is valid for valid in VALID):
            return f"refuses what is valid: {error}"
        if "\n" in message or not SENTENCE.fullmatch(message):
            return f"is not a sentence about a key: {message[:300]!r}"
        # Whatever the user sent is marked with Q, so that a quote can be measured.
        if len(message) > 500 or message.count("Q") > 200:
            return f"says {len(message)} characters, {message.count('Q')} of them quoted"
        return None
    except Exception as error:
        return f"raises {type(error).__name__}"
    keys = with_underscores(raw)
    pairs = zip(parsed.levels, keys["levels"], strict=True)
    same = parsed.num_speculative_tokens is keys["num_speculative_tokens"]
    return None if same and not any(changes_values(*pair) for pair in pairs) else "changes values"


def check(parse: Callable[[Any], object], sought: str = "") -> None:
    """Fail at the first objection of its kind to what a parser does with cascades, valid or not."""
    draw = random.Random(0)
    raws = [*VALID, *HUGE, {**VALID[-1], "num_speculative_tokens": True}]
    for raw in itertools.chain(raws, (changed(draw) for _ in range(10_000))):
        said = objection(parse, raw)
        assert not said or not said.startswith(sought), said


def test_every_change_is_accepted_or_gets_one_sentence():
    check(CascadeConfig.parse)


def _true_is_one(raw: Any) -> object:
    if isinstance(raw, dict):
        raw = {key: int(value) if value is True else value for key, value in raw.items()}
    return CascadeConfig.parse(raw)


def _drops_levels(raw: Any) -> object:
    parsed = CascadeConfig.parse(raw)
    return parsed.model_copy(update={"levels": parsed.levels[::-1]})


def _refuses_by(message: Callable[[str, Any], str]) -> Callable[[Any], object]:
    """A parser that says this of what is refused: of the right message and what was given."""

    def parse(raw: Any) -> object:
        try:
            return CascadeConfig.parse(raw)
        except UserError as error:
            raise UserError(message(str(error), raw)) from None

    return parse


def _refuses_dashes(raw: Any) -> object:
    if isinstance(raw, dict) and any(isinstance(key, str) and "-" in key for key in raw):
        raise UserError("levels: use underscores.")
    return CascadeConfig.parse(raw)


def _looks_up_without_asking(raw: Any) -> object:
    _ = raw["levels"] if isinstance(raw, dict) else None
    return CascadeConfig.parse(raw)


@pytest.mark.parametrize(
    ("said", "parse"),
    [
        ("changes values", _true_is_one),
        ("changes values", _drops_levels),
        ("says ", _refuses_by(lambda message, raw: f"{message[:-1]} ({raw!r:.9000}).")),
        ("refuses what is valid", _refuses_dashes),
        ("is not a sentence", _refuses_by(lambda message, raw: "Input should be a valid integer.")),
        ("raises KeyError", _looks_up_without_asking),
    ],
)
def test_the_harness_catches_a_broken_parser(said, parse):
    with pytest.raises(AssertionError, match=said):
        check(parse, said)
