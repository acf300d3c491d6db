"""A drafter that is broken costs speed, never text; one that cannot be loaded is named."""

import itertools
import json

import pytest
from support import damage
from support.engines import run_engine
from support.exact_joint_distribution import chi_square_p_value, joint_distribution
from support.sampling_cases import SIGNIFICANCE

PROMPTS = [[(3 * i + j * j) % 5 for j in range(4 + 6 * i)] for i in range(6)]
GREEDY = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
SAMPLED_PROMPT, SAMPLES = [2, 4, 4, 0, 3], 300
SAMPLED = {
    "prompts": [SAMPLED_PROMPT] * SAMPLES,
    "params": {"max_tokens": 4, "ignore_eos": True},
}
MIXED = [{**GREEDY, "temperature": i % 2, "seed": i} for i in range(len(PROMPTS))]
JOBS = {
    "greedy": {"prompts": PROMPTS, "params": GREEDY},
    "mixed": {"prompts": PROMPTS, "params": MIXED},
    "sampled": SAMPLED,
}


def cascade(*levels: dict, **keys) -> dict:
    """Engine arguments of a cascade; every level but the last proposes three tokens."""
    *below, top = levels
    levels = [*({"num_tokens": 3, **level} for level in below), top]
    config = {"method": "hsd", "num_speculative_tokens": 5, "levels": levels}
    config |= {"adaptive": False, **keys}
    return {"speculative_config": config}


@pytest.fixture(scope="module")
def plain(small_vocabulary):
    return run_engine({"model": small_vocabulary.target}, JOBS)


@pytest.fixture(scope="module")
def expected(small_vocabulary):
    return joint_distribution(small_vocabulary.target, SAMPLED_PROMPT, 4, {})


def sampled_outputs(result: dict) -> list[tuple[int, ...]]:
    return [tuple(output[0]["ids"]) for output in result["outputs"]]


# Position of the damaged level -> the cascade around it.
PLACES = {
    "alone": lambda family, broken: (0, cascade(broken)),
    "lowest": lambda family, broken: (0, cascade(broken, {"model": family.mid})),
    "lowest and horizontal": lambda family, broken: (
        0,
        cascade(broken, {"model": family.mid}, horizontal_tokens=2),
    ),
    "middle": lambda family, broken: (
        1,
        cascade({"model": family.small, "num_tokens": 2}, broken, {"model": family.mid}),
    ),
    "top": lambda family, broken: (1, cascade({"model": family.small}, broken)),
}
DAMAGES = {
    "everything is NaN": damage.nan_everywhere,
    "one logit is NaN": damage.nan_for_one_token,
    "NaN after one token": damage.nan_after_one_token,
    "one logit overflows": damage.inf_for_one_token,
}
COMBINATIONS = [
    ("everything is NaN", "lowest and horizontal"),
    ("NaN after one token", "middle"),
    *(
        pytest.param(kind, place, marks=pytest.mark.slow)
        for kind, place in (
            ("everything is NaN", "alone"),
            ("everything is NaN", "middle"),
            ("everything is NaN", "top"),
            ("one logit is NaN", "top"),
            ("NaN after one token", "lowest"),
            ("one logit overflows", "middle"),
        )
    ),
]


@pytest.mark.parametrize(("kind", "place"), COMBINATIONS)
def test_weights_that_are_not_finite(
    small_vocabulary, plain, expected, tmp_path, monkeypatch, kind, place
):
    change = damage.change_weights(DAMAGES[kind])
    broken = damage.damaged_copy(small_vocabulary.mid, tmp_path / "broken", change)
    index, arguments = PLACES[place](small_vocabulary, {"model": broken})
    record = tmp_path / "warnings"
    result = run_engine(
        {"model": small_vocabulary.target, **arguments},
        JOBS,
        patch="support.damage:record_warnings",
        env={damage.RECORD: str(record)},
    )
    assert result["greedy"]["outputs"] == plain["greedy"]["outputs"]
    assert result["mixed"]["outputs"][::2] == plain["mixed"]["outputs"][::2]
    assert chi_square_p_value(sampled_outputs(result["sampled"]), expected) > SIGNIFICANCE
    warnings = [line for line in record.read_text().splitlines() if "levels[" in line]
    assert len(warnings) == (0 if kind == "one logit overflows" else 1), warnings
    assert all(f"levels[{index}]" in line for line in warnings)


LIMIT = 64
LONG_PROMPTS = [[(3 * n + j * j) % 5 for j in range(n)] for n in (8, 40, 58, 61, 62, 63, 64, 90)]
# Sampled where the drafter's context ends between the first and the last of four tokens.
EDGE_PROMPT = [(j * j) % 5 for j in range(LIMIT - 3)]
LONG_JOBS = {
    "greedy": {"prompts": LONG_PROMPTS, "params": {**GREEDY, "max_tokens": 40}},
    "one by one": {"prompts": LONG_PROMPTS[3:4], "params": {**GREEDY, "max_tokens": 40}},
    "sampled": {
        "prompts": [EDGE_PROMPT] * SAMPLES,
        "params": {"max_tokens": 6, "ignore_eos": True},
    },
}
SHORT = {
    "alone": lambda family, short: cascade(short),
    "lowest": lambda family, short: cascade(short, {"model": family.mid}),
    "lowest and horizontal": lambda family, short: cascade(
        short, {"model": family.mid}, horizontal_tokens=2
    ),
    "middle": lambda family, short: cascade(
        {"model": family.small, "num_tokens": 2}, short, {"model": family.mid}
    ),
    "top": lambda family, short: cascade({"model": family.small}, short),
    "top above n-grams": lambda family, short: cascade({"ngram": {"max": 3}}, short),
}


@pytest.fixture(scope="module")
def plain_long(small_vocabulary):
    greedy = {name: job for name, job in LONG_JOBS.items() if name != "sampled"}
    return run_engine({"model": small_vocabulary.target}, greedy)


@pytest.fixture(scope="module")
def expected_at_the_edge(small_vocabulary):
    last: dict[tuple[int, ...], float] = {}
    for outcome, p in joint_distribution(small_vocabulary.target, EDGE_PROMPT, 6, {}).items():
        last[outcome[2:]] = last.get(outcome[2:], 0.0) + p
    return last


SHORT_IN_THE_FAST_SUITE = [
    ("lowest and horizontal", "config.json"),
    ("top", "the key max_model_len"),
]


@pytest.mark.parametrize(
    ("place", "by"),
    [
        pair if pair in SHORT_IN_THE_FAST_SUITE else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in itertools.product(SHORT, ("config.json", "the key max_model_len"))
    ],
)
def test_drafter_with_a_shorter_context(
    small_vocabulary, plain_long, expected_at_the_edge, tmp_path, place, by
):
    if by == "config.json":
        change = damage.change_config(max_position_embeddings=LIMIT)
        short = {"model": damage.damaged_copy(small_vocabulary.mid, tmp_path / "short", change)}
    else:
        short = {"model": small_vocabulary.mid, "max_model_len": LIMIT}
    arguments = SHORT[place](small_vocabulary, short)
    index = [level.get("model") for level in arguments["speculative_config"]["levels"]].index(
        short["model"]
    )
    record = tmp_path / "positions"
    result = run_engine(
        {"model": small_vocabulary.target, **arguments},
        LONG_JOBS,
        patch="support.damage:record_positions",
        env={damage.RECORD: str(record)},
    )
    for job in ("greedy", "one by one"):
        assert result[job]["outputs"] == plain_long[job]["outputs"]
    sampled = [ids[2:] for ids in sampled_outputs(result["sampled"])]
    assert chi_square_p_value(sampled, expected_at_the_edge) > SIGNIFICANCE
    highest = json.loads(record.read_text())
    assert LIMIT - 4 <= highest[f"hsd_level{index}.model"] < LIMIT
    assert highest["model"] > LIMIT
    assert result["greedy"]["levels"][index]["drafted"] > 0


UNLOADABLE = {
    "half of the file": damage.truncate,
    "a part of its header": damage.truncate_header,
    "an empty file": damage.empty,
    "no file": damage.remove,
    "text": damage.replace_by_text,
    "a head of fewer tokens": damage.change_weights(damage.cut_rows),
    "a layer of fewer columns": damage.change_weights(damage.cut_columns),
    "another width in config.json": damage.change_config(hidden_size=128),
}


IN_THE_FAST_SUITE = ("half of the file", "a layer of fewer columns")


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in IN_THE_FAST_SUITE else pytest.param(kind, marks=pytest.mark.slow)
        for kind in UNLOADABLE
    ],
)
def test_weights_that_cannot_be_loaded_are_named(small_vocabulary, tmp_path, kind):
    broken = damage.damaged_copy(small_vocabulary.mid, tmp_path / "broken", UNLOADABLE[kind])
    arguments = cascade({"model": small_vocabulary.small}, {"model": broken})
    with pytest.raises(RuntimeError) as raised:
        run_engine({"model": small_vocabulary.target, **arguments}, {})
    lines = [line for line in str(raised.value).splitlines() if "levels[1]" in line]
    assert lines, str(raised.value)[-2000:]
    assert broken in lines[-1] and len(lines[-1]) < 600, lines[-1]
