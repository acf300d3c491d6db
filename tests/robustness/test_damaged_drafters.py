"""A drafter or head that is broken costs speed, never text; one that cannot be loaded is named."""

import json

import pytest
import torch
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
from support.eagle3_head import write_eagle3_head
from support.engines import ids, run_engine
from support.exact_joint_distribution import chi_square_p_value, joint_distribution, marginal
from support.level_files import cascade
from support.marks import slow_but
from support.sampling_cases import SIGNIFICANCE

PROMPTS = [[(3 * i + j * j) % 5 for j in range(4 + 6 * i)] for i in range(6)]
GREEDY = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
SAMPLED = {**GREEDY, "temperature": 1}
SAMPLED_PROMPT, SAMPLES = [2, 4, 4, 0, 3], 300
MIXED = [{**GREEDY, "temperature": i % 2, "seed": i} for i in range(len(PROMPTS))]
JOBS = {
    "greedy": {"prompts": PROMPTS, "params": GREEDY},
    "prefix hits": {"prompts": PROMPTS, "params": GREEDY},
    "mixed": {"prompts": PROMPTS, "params": MIXED},
    "sampled": {"prompts": [SAMPLED_PROMPT] * SAMPLES, "params": {**SAMPLED, "max_tokens": 4}},
}
MODEL, HEAD = "model", "eagle3"


def placed(place: str, family, broken: dict) -> tuple[int, dict]:
    """Index of a broken level, and an engine with it; all but the last propose three tokens."""
    small, mid, ngram = {"model": family.small}, {"model": family.mid}, {"ngram": {"max": 3}}
    *below, top = {
        "alone": [broken],
        "several drafts": [{**broken, "branches": 2}],
        "lowest": [broken, mid],
        "lowest and horizontal": [broken, mid],
        "middle": [{**small, "num_tokens": 2}, broken, mid],
        "top": [small, broken],
        "top above n-grams": [ngram, broken],
        "among sources": [{"sources": [{"ngram": {"min": 3, "max": 5}}, broken]}],
    }[place]
    keys = {"horizontal_tokens": 2} if place.endswith("horizontal") else {}
    config = cascade(*({"num_tokens": 3, **level} for level in below), top, **keys)
    return int(place.startswith(("middle", "top"))), {"model": family.target, **config}


@pytest.fixture(scope="module")
def drafters(small_vocabulary, tmp_path_factory) -> dict[str, str]:
    """Kind of level -> directory of a sound one."""
    directory = tmp_path_factory.mktemp("head")
    head = write_eagle3_head(small_vocabulary.target, directory, draft_vocabulary=4, trained=True)
    return {MODEL: small_vocabulary.mid, HEAD: head}


@pytest.fixture(scope="module")
def plain(small_vocabulary):
    return run_engine({"model": small_vocabulary.target}, JOBS | LONG_JOBS)


@pytest.fixture(scope="module")
def expected(small_vocabulary):
    return joint_distribution(small_vocabulary.target, SAMPLED_PROMPT, 4, {})


def is_stock(kind: str, place: str) -> bool:
    """Whether vLLM's own drafter serves it, which has no levels and no warnings of ours."""
    return kind == HEAD and place in ("alone", "among sources")


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


@pytest.mark.parametrize(("kind", "damage", "place"), slow_but(CASES[:4], CASES))
def test_a_broken_drafter_changes_no_text(
    small_vocabulary, drafters, plain, expected, tmp_path, kind, damage, place
):
    broken = damaged_copy(drafters[kind], tmp_path / "broken", BROKEN[kind][damage])
    index, engine = placed(place, small_vocabulary, {kind: broken})
    record, patch = tmp_path / "warnings", "support.damage:record_warnings"
    result = run_engine(engine, JOBS, patch=patch, env={RECORD: str(record)})
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
    "long": {"prompts": LONG_PROMPTS, "params": {**GREEDY, "max_tokens": 40}},
    "one by one": {"prompts": LONG_PROMPTS[3:4], "params": {**GREEDY, "max_tokens": 40}},
    "edge": {"prompts": [EDGE_PROMPT] * SAMPLES, "params": {**SAMPLED, "max_tokens": 6}},
}


@pytest.fixture(scope="module")
def expected_at_the_edge(small_vocabulary):
    return marginal(joint_distribution(small_vocabulary.target, EDGE_PROMPT, 6, {}), slice(2, None))


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


@pytest.mark.parametrize(("kind", "place", "by"), slow_but(SHORT[:2], SHORT))
def test_drafter_with_a_shorter_context(
    small_vocabulary, drafters, plain, expected_at_the_edge, tmp_path, kind, place, by
):
    short = {kind: drafters[kind], "max_model_len": LIMIT}
    if by == BY_CONFIG:
        change = change_config(max_position_embeddings=LIMIT)
        short = {kind: damaged_copy(drafters[kind], tmp_path / "short", change)}
    index, engine = placed(place, small_vocabulary, short)
    record = tmp_path / "positions"
    patch = "support.damage:record_positions" if kind == MODEL else None
    result = run_engine(engine, LONG_JOBS, patch=patch, env={RECORD: str(record)})
    for job in ("long", "one by one"):
        assert result[job]["outputs"] == plain[job]["outputs"]
    sampled = [tuple(text[2:]) for text in ids(result["edge"])]
    assert chi_square_p_value(sampled, expected_at_the_edge) > SIGNIFICANCE
    if not is_stock(kind, place):
        assert result["long"]["levels"][index]["drafted"] > 0
    if kind == MODEL:
        highest = json.loads(record.read_text())
        assert LIMIT - 4 <= highest[f"hsd_level{index}.model"] < LIMIT
        assert highest["model"] > LIMIT


STATES = "eagle_aux_hidden_state_layer_ids"
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
        "a layer of fewer columns": cut("model.layers.0.mlp.down_proj.weight", ..., slice(-8)),
        "layers of another type": change_config(num_hidden_layers="many"),
        "unknown architecture": change_config(architectures=["Nonsense"]),
        "no vocabulary": change_config(vocab_size=-1),
    },
    HEAD: {
        **BOTH,
        "fewer tokens in config.json": change_config(draft_vocab_size=3),
        "tokens that are no number": change_config(draft_vocab_size="x"),
        "states of a layer that is not there": change_config(**{STATES: [0, 1, 9]}),
        "states of two layers": change_config(**{STATES: [0, 1]}),
        "states of text": change_config(**{STATES: "x"}),
        "a token below 0": fill("d2t", 0, -1),
        "a token beyond the vocabulary": fill("d2t", 0, 5),
        "a token twice": fill("d2t", ..., torch.tensor([0, -1, 0, 0])),
    },
}
UNLOADABLE_CASES = [(kind, damage) for kind, damages in UNLOADABLE.items() for damage in damages]
FAST = (MODEL, "half of the file"), (MODEL, "a layer of fewer columns")
FAST += ((HEAD, "a token beyond the vocabulary"),)


@pytest.mark.parametrize(("kind", "damage"), slow_but(FAST, UNLOADABLE_CASES))
def test_a_drafter_that_cannot_be_loaded_is_named(
    small_vocabulary, drafters, tmp_path, kind, damage
):
    broken = damaged_copy(drafters[kind], tmp_path / "broken", UNLOADABLE[kind][damage])
    place = "top" if kind == MODEL else "lowest"
    index, engine = placed(place, small_vocabulary, {kind: broken})
    with pytest.raises(RuntimeError) as raised:
        run_engine(engine, {})
    # The end of the process's log has one sentence that names the level and its file.
    log = str(raised.value)
    lines = [line for line in log.splitlines() if f"levels[{index}]" in line]
    assert lines, log[-3000:]
    assert broken in lines[-1] and len(lines[-1]) < 600, lines[-1]
