"""A drafter or head that is broken costs speed, never text; one that cannot be loaded is named."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import level_files
from support.damage import (
    RECORD,
    WEIGHTS,
    change_config,
    change_file,
    change_weights,
    cut,
    damaged_copy,
    fill,
)
from support.damaged_bytes import damaged
from support.eagle3_head import write_eagle3_head
from support.engines import ids, run_engine
from support.exact_joint_distribution import chi_square_p_value, joint_distribution
from support.sampling_cases import SIGNIFICANCE

PROMPTS = [[(3 * i + j * j) % 5 for j in range(4 + 6 * i)] for i in range(6)]
GREEDY = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
SAMPLED_PROMPT, SAMPLES = [2, 4, 4, 0, 3], 300
MIXED = [{**GREEDY, "temperature": i % 2, "seed": i} for i in range(len(PROMPTS))]
JOBS = {
    "greedy": {"prompts": PROMPTS, "params": GREEDY},
    "prefix hits": {"prompts": PROMPTS, "params": GREEDY},
    "mixed": {"prompts": PROMPTS, "params": MIXED},
    "sampled": {
        "prompts": [SAMPLED_PROMPT] * SAMPLES,
        "params": {"max_tokens": 4, "ignore_eos": True},
    },
}
MODEL, HEAD = "model", "eagle3"
# Where the broken level stands -> (its index, the cascade around it). All but the last level
# propose three tokens.
PLACES: dict[str, tuple[int, Callable]] = {
    "alone": (0, lambda family, broken: cascade(broken)),
    "several drafts": (0, lambda family, broken: cascade({**broken, "branches": 2})),
    "lowest": (0, lambda family, broken: cascade(broken, {"model": family.mid})),
    "lowest and horizontal": (
        0,
        lambda family, broken: cascade(broken, {"model": family.mid}, horizontal_tokens=2),
    ),
    "middle": (
        1,
        lambda family, broken: cascade(
            {"model": family.small, "num_tokens": 2}, broken, {"model": family.mid}
        ),
    ),
    "top": (1, lambda family, broken: cascade({"model": family.small}, broken)),
    "top above n-grams": (1, lambda family, broken: cascade({"ngram": {"max": 3}}, broken)),
    "among sources": (
        0,
        lambda family, broken: cascade({"sources": [{"ngram": {"min": 3, "max": 5}}, broken]}),
    ),
}


def cascade(*levels: dict, **keys) -> dict:
    *below, top = levels
    return level_files.cascade(*({"num_tokens": 3, **level} for level in below), top, **keys)


@pytest.fixture(scope="module")
def drafters(small_vocabulary, tmp_path_factory) -> dict[str, str]:
    """Kind of level -> directory of a sound one."""
    directory = tmp_path_factory.mktemp("head")
    target = small_vocabulary.target
    head = write_eagle3_head(target, directory, draft_vocabulary=4, trained=True)
    return {MODEL: small_vocabulary.mid, HEAD: head}


@pytest.fixture(scope="module")
def plain(small_vocabulary):
    return run_engine({"model": small_vocabulary.target}, JOBS)


@pytest.fixture(scope="module")
def expected(small_vocabulary):
    return joint_distribution(small_vocabulary.target, SAMPLED_PROMPT, 4, {})


def fast_and_slow(fast: tuple, cases: list[tuple]) -> list:
    """The cases, slow but for those whose first values are in `fast`."""
    return [
        pytest.param(*case, id=", ".join(map(str, case)), marks=[] if case in fast else SLOW)
        for case in cases
    ]


def is_stock(kind: str, place: str) -> bool:
    """Whether vLLM's own drafter serves it, which has no levels and no warnings of ours."""
    return kind == HEAD and place in ("alone", "among sources")


SLOW = [pytest.mark.slow]
nan = float("nan")
# Kind of level -> name -> damage. A missing tensor is not noticed by vLLM's loader of heads (0.32):
# what is in memory drafts.
BROKEN = {
    MODEL: {
        "everything is NaN": fill("model.norm.weight", ..., nan),
        "one logit is NaN": fill("lm_head.weight", 3, nan),
        "NaN after one token": fill("model.embed_tokens.weight", 4, nan),
        "one logit overflows": fill("lm_head.weight", 3, 1e38),
    },
    HEAD: {
        "everything is NaN": fill("norm.weight", ..., nan),
        "one logit is NaN": fill("lm_head.weight", 2, nan),
        "its states are NaN": fill("fc.weight", (0, 0), nan),
        "one logit overflows": fill("lm_head.weight", 1, 1e38),
        "no fc": change_weights(lambda weights: weights.pop("fc.weight")),
        "no d2t": change_weights(lambda weights: weights.pop("d2t")),
    },
}
CASES = [
    (MODEL, "everything is NaN", "lowest and horizontal"),
    (MODEL, "NaN after one token", "middle"),
    (HEAD, "its states are NaN", "lowest"),
    (MODEL, "NaN after one token", "several drafts"),
    (MODEL, "everything is NaN", "alone"),
    (MODEL, "everything is NaN", "top"),
    (MODEL, "one logit is NaN", "top"),
    (MODEL, "NaN after one token", "lowest"),
    (MODEL, "one logit overflows", "middle"),
    (HEAD, "everything is NaN", "alone"),
    (HEAD, "everything is NaN", "among sources"),
    (HEAD, "one logit is NaN", "alone"),
    (HEAD, "one logit overflows", "lowest"),
    (HEAD, "no fc", "alone"),
    (HEAD, "no d2t", "alone"),
]


@pytest.mark.parametrize(("kind", "damage", "place"), fast_and_slow(tuple(CASES[:4]), CASES))
def test_a_broken_drafter_changes_no_text(
    small_vocabulary, drafters, plain, expected, tmp_path, kind, damage, place
):
    broken = damaged_copy(drafters[kind], tmp_path / "broken", BROKEN[kind][damage])
    index, around = PLACES[place]
    record = tmp_path / "warnings"
    result = run_engine(
        {"model": small_vocabulary.target, **around(small_vocabulary, {kind: broken})},
        JOBS,
        patch="support.damage:record_warnings",
        env={RECORD: str(record)},
    )
    for job in ("greedy", "prefix hits"):
        assert result[job]["outputs"] == plain[job]["outputs"]
    assert result["mixed"]["outputs"][::2] == plain["mixed"]["outputs"][::2]
    sampled = [tuple(text) for text in ids(result["sampled"])]
    assert chi_square_p_value(sampled, expected) > SIGNIFICANCE
    warnings = [line for line in record.read_text().splitlines() if "levels[" in line]
    if "NaN" in damage and not is_stock(kind, place):
        assert len(warnings) == 1 and f"levels[{index}]" in warnings[0], warnings


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


BY_CONFIG, BY_KEY = "config.json", "the key max_model_len"
SHORT = [
    (MODEL, "lowest and horizontal", BY_CONFIG),
    (MODEL, "top", BY_KEY),
    *((MODEL, place, BY_KEY) for place in ("alone", "lowest", "middle")),
    (MODEL, "top above n-grams", BY_CONFIG),
    # The key is refused where vLLM's drafter serves the head.
    *((HEAD, place, BY_CONFIG) for place in ("alone", "lowest", "among sources")),
    (HEAD, "lowest", BY_KEY),
    (MODEL, "several drafts", BY_CONFIG),
]


@pytest.mark.parametrize(("kind", "place", "by"), fast_and_slow(tuple(SHORT[:2]), SHORT))
def test_drafter_with_a_shorter_context(
    small_vocabulary, drafters, plain_long, expected_at_the_edge, tmp_path, kind, place, by
):
    short = {kind: drafters[kind], "max_model_len": LIMIT}
    if by == BY_CONFIG:
        change = change_config(max_position_embeddings=LIMIT)
        short = {kind: damaged_copy(drafters[kind], tmp_path / "short", change)}
    index, around = PLACES[place]
    record = tmp_path / "positions"
    result = run_engine(
        {"model": small_vocabulary.target, **around(small_vocabulary, short)},
        LONG_JOBS,
        patch="support.damage:record_positions" if kind == MODEL else None,
        env={RECORD: str(record)},
    )
    for job in ("greedy", "one by one"):
        assert result[job]["outputs"] == plain_long[job]["outputs"]
    sampled = [tuple(text[2:]) for text in ids(result["sampled"])]
    assert chi_square_p_value(sampled, expected_at_the_edge) > SIGNIFICANCE
    if not is_stock(kind, place):
        assert result["greedy"]["levels"][index]["drafted"] > 0
    if kind == MODEL:
        highest = json.loads(record.read_text())
        assert LIMIT - 4 <= highest[f"hsd_level{index}.model"] < LIMIT
        assert highest["model"] > LIMIT


BOTH = {
    "half of the file": change_file(lambda content: content[: len(content) // 2]),
    "a part of its header": change_file(lambda content: content[:20]),
    "an empty file": change_file(lambda content: b""),
    "text": change_file(lambda content: b"these are no weights\n" * 100),
    "no file": lambda directory: (directory / WEIGHTS).unlink(),
    "a head of fewer tokens": cut("lm_head.weight", slice(-1)),
    "another width in config.json": change_config(hidden_size=128),
    "no JSON": change_file(lambda content: b"{", "config.json"),
    "a list in config.json": change_file(lambda content: b"[1]", "config.json"),
}
UNLOADABLE = {
    MODEL: {
        **BOTH,
        "a layer of fewer columns": cut(
            "model.layers.0.mlp.down_proj.weight", slice(None), slice(-8)
        ),
        "layers of another type": change_config(num_hidden_layers="many"),
        "unknown architecture": change_config(architectures=["Nonsense"]),
        "no vocabulary": change_config(vocab_size=-1),
    },
    HEAD: {
        **BOTH,
        "fewer tokens in config.json": change_config(draft_vocab_size=3),
        "tokens that are no number": change_config(draft_vocab_size="x"),
        "states of a layer that is not there": change_config(
            eagle_aux_hidden_state_layer_ids=[0, 1, 9]
        ),
        "states of two layers": change_config(eagle_aux_hidden_state_layer_ids=[0, 1]),
        "states of text": change_config(eagle_aux_hidden_state_layer_ids="x"),
        "a token below 0": fill("d2t", 0, -1),
        "a token beyond the vocabulary": fill("d2t", 0, 5),
        "a token twice": fill("d2t", ..., torch.tensor([0, -1, 0, 0])),
    },
}
LOADING_IN_THE_FAST_SUITE = (
    (MODEL, "half of the file"),
    (MODEL, "a layer of fewer columns"),
    (HEAD, "a token beyond the vocabulary"),
)


def assert_named(error: RuntimeError, level: str, path: str) -> None:
    """The end of the process's log has one sentence that names the level and its file."""
    lines = [line for line in str(error).splitlines() if level in line]
    assert lines, str(error)[-3000:]
    assert path in lines[-1] and len(lines[-1]) < 600, lines[-1]


@pytest.mark.parametrize(
    ("kind", "damage"),
    fast_and_slow(
        LOADING_IN_THE_FAST_SUITE,
        [(kind, damage) for kind, damages in UNLOADABLE.items() for damage in damages],
    ),
)
def test_a_drafter_that_cannot_be_loaded_is_named(
    small_vocabulary, drafters, tmp_path, kind, damage
):
    broken = damaged_copy(drafters[kind], tmp_path / "broken", UNLOADABLE[kind][damage])
    index, around = PLACES["top" if kind == MODEL else "lowest"]
    with pytest.raises(RuntimeError) as raised:
        arguments = around(small_vocabulary, {kind: broken})
        run_engine({"model": small_vocabulary.target, **arguments}, {})
    assert_named(raised.value, f"levels[{index}]", broken)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_heads_with_random_damage_draft_or_are_named(small_vocabulary, drafters, plain, tmp_path):
    """Bytes of config.json and of the header and some weights: it loads, or one sentence."""
    rng, loaded = random.Random(0), 0
    for i in range(24):
        broken = tmp_path / f"head-{i}"
        shutil.copytree(drafters[HEAD], broken)
        path = Path(broken, "config.json" if i % 2 else WEIGHTS)
        path.write_bytes(damaged(rng, path.read_bytes()))
        arguments = cascade({HEAD: str(broken)})
        try:
            result = run_engine(
                {"model": small_vocabulary.target, **arguments}, {"greedy": JOBS["greedy"]}
            )
        except RuntimeError as error:
            assert_named(error, "levels[0].eagle3", str(broken))
        else:
            loaded += 1
            assert result["greedy"]["outputs"] == plain["greedy"]["outputs"]
    assert 0 < loaded < 24
