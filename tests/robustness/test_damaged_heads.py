"""A broken EAGLE-3 head costs speed, never text; one that cannot be loaded is named."""

import random
import shutil

import pytest
import torch
from support import damage
from support.damaged_bytes import damaged
from support.eagle3_head import write_eagle3_head
from support.engines import run_engine
from support.exact_joint_distribution import chi_square_p_value, joint_distribution
from support.sampling_cases import SIGNIFICANCE

PROMPTS = [[(3 * i + j * j) % 5 for j in range(4 + 6 * i)] for i in range(6)]
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
SAMPLED_PROMPT, SAMPLES = [2, 4, 4, 0, 3], 500
JOBS = {
    "greedy": {"prompts": PROMPTS, "params": GREEDY},
    "prefix hits": {"prompts": PROMPTS, "params": GREEDY},
    "sampled": {
        "prompts": [SAMPLED_PROMPT] * SAMPLES,
        "params": {"max_tokens": 4, "ignore_eos": True},
    },
}
GREEDY_JOBS = ("greedy", "prefix hits")


@pytest.fixture(scope="module")
def head(small_vocabulary, tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("head")
    return write_eagle3_head(small_vocabulary.target, directory, draft_vocabulary=4, trained=True)


@pytest.fixture(scope="module")
def plain(small_vocabulary):
    jobs = {name: JOBS[name] for name in GREEDY_JOBS}
    return run_engine({"model": small_vocabulary.target}, jobs)


@pytest.fixture(scope="module")
def expected(small_vocabulary):
    return joint_distribution(small_vocabulary.target, SAMPLED_PROMPT, 4, {})


def cascade(place: str, head: dict, mid: str) -> dict:
    levels = {
        "alone": [head],
        "below a model": [{**head, "num_tokens": 3}, {"model": mid}],
        "in sources": [{"sources": [{"ngram": {"min": 3, "max": 5}}, head]}],
    }[place]
    config = {"method": "hsd", "num_speculative_tokens": 5, "levels": levels}
    config["adaptive"] = False
    return {"speculative_config": config}


def fill(name: str, index: object, value: float):
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[name][index] = value

    return damage.change_weights(change)


nan = float("nan")
NOT_FINITE = {
    "everything is NaN": fill("norm.weight", ..., nan),
    "one logit is NaN": fill("lm_head.weight", 2, nan),
    "its states are NaN": fill("fc.weight", (0, 0), nan),
    "one logit overflows": fill("lm_head.weight", 1, 1e38),
}
SLOWLY = pytest.mark.slow


def assert_lossless(result: dict, plain: dict, expected: dict) -> None:
    for job in GREEDY_JOBS:
        assert result[job]["outputs"] == plain[job]["outputs"]
    sampled = [tuple(output[0]["ids"]) for output in result["sampled"]["outputs"]]
    assert chi_square_p_value(sampled, expected) > SIGNIFICANCE


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("its states are NaN", "below a model"),
        pytest.param("everything is NaN", "alone", marks=SLOWLY),
        pytest.param("everything is NaN", "in sources", marks=SLOWLY),
        pytest.param("one logit is NaN", "alone", marks=SLOWLY),
        pytest.param("its states are NaN", "in sources", marks=SLOWLY),
        pytest.param("one logit overflows", "below a model", marks=SLOWLY),
    ],
)
def test_weights_that_are_not_finite(
    small_vocabulary, head, plain, expected, tmp_path, kind, place
):
    broken = {"eagle3": damage.damaged_copy(head, tmp_path / "broken", NOT_FINITE[kind])}
    record = tmp_path / "warnings"
    result = run_engine(
        {"model": small_vocabulary.target, **cascade(place, broken, small_vocabulary.mid)},
        JOBS,
        patch="support.damage:record_warnings",
        env={damage.RECORD: str(record)},
    )
    assert_lossless(result, plain, expected)
    warnings = [line for line in record.read_text().splitlines() if "levels[" in line]
    assert len(warnings) == 1 and "levels[0]" in warnings[0], warnings


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fc.weight", "midlayer.self_attn.q_proj.weight", "d2t"])
def test_a_tensor_is_missing(small_vocabulary, head, plain, expected, tmp_path, name):
    """vLLM's loader of heads does not notice (0.32): what is in memory drafts."""
    change = damage.change_weights(lambda weights: weights.pop(name))
    broken = {"eagle3": damage.damaged_copy(head, tmp_path / "broken", change)}
    arguments = cascade("alone", broken, small_vocabulary.mid)
    result = run_engine({"model": small_vocabulary.target, **arguments}, JOBS)
    assert_lossless(result, plain, expected)


LIMIT = 64
LONG_PROMPTS = [[(3 * n + j * j) % 5 for j in range(n)] for n in (8, 40, 58, 61, 62, 63, 64, 90)]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["alone", "below a model", "in sources"])
@pytest.mark.parametrize("by", ["config.json", "the key max_model_len"])
def test_head_with_a_shorter_context(small_vocabulary, head, tmp_path, place, by):
    if by == "config.json":
        change = damage.change_config(max_position_embeddings=LIMIT)
        short = {"eagle3": damage.damaged_copy(head, tmp_path / "short", change)}
    else:
        short = {"eagle3": head, "max_model_len": LIMIT}
    jobs = {name: {"prompts": LONG_PROMPTS, "params": GREEDY} for name in GREEDY_JOBS}
    wanted = run_engine({"model": small_vocabulary.target}, jobs)
    arguments = cascade(place, short, small_vocabulary.mid)
    result = run_engine({"model": small_vocabulary.target, **arguments}, jobs)
    for job in GREEDY_JOBS:
        assert result[job]["outputs"] == wanted[job]["outputs"]
    assert result["greedy"]["levels"][0]["drafted"] > 0


def offset(value: int):
    """Damage to the map from the head's tokens to the target's."""
    return fill("d2t", 0, value)


UNLOADABLE = {
    "half of the file": damage.truncate,
    "a part of its header": damage.truncate_header,
    "an empty file": damage.empty,
    "no file": damage.remove,
    "text": damage.replace_by_text,
    "an output head of fewer tokens": damage.change_weights(damage.cut_rows),
    "another width in config.json": damage.change_config(hidden_size=128),
    "fewer tokens in config.json": damage.change_config(draft_vocab_size=3),
    "tokens that are no number": damage.change_config(draft_vocab_size="x"),
    "states of a layer that is not there": damage.change_config(
        eagle_aux_hidden_state_layer_ids=[0, 1, 9]
    ),
    "states of two layers": damage.change_config(eagle_aux_hidden_state_layer_ids=[0, 1]),
    "states of text": damage.change_config(eagle_aux_hidden_state_layer_ids="x"),
    "a token below 0": offset(-1),
    "a token beyond the vocabulary": offset(5),
    "a token twice": damage.change_weights(
        lambda weights: weights["d2t"].copy_(torch.tensor([0, -1, 0, 0]))
    ),
}
IN_THE_FAST_SUITE = ("a token beyond the vocabulary",)


def assert_named(error: RuntimeError, path: str) -> None:
    """The end of the process's log has one sentence that names the level and its file."""
    lines = [line for line in str(error).splitlines() if "levels[0].eagle3" in line]
    assert lines, str(error)[-3000:]
    assert path in lines[-1] and len(lines[-1]) < 600, lines[-1]


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in IN_THE_FAST_SUITE else pytest.param(kind, marks=SLOWLY)
        for kind in UNLOADABLE
    ],
)
def test_a_head_that_cannot_be_loaded_is_named(small_vocabulary, head, tmp_path, kind):
    broken = damage.damaged_copy(head, tmp_path / "broken", UNLOADABLE[kind])
    arguments = cascade("below a model", {"eagle3": broken}, small_vocabulary.mid)
    with pytest.raises(RuntimeError) as raised:
        run_engine({"model": small_vocabulary.target, **arguments}, {})
    assert_named(raised.value, broken)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_heads_with_random_damage_draft_or_are_named(small_vocabulary, head, plain, tmp_path):
    """Bytes of config.json and of the header and some weights: it loads, or one sentence."""
    rng, loaded = random.Random(0), 0
    for i in range(24):
        broken = tmp_path / f"head-{i}"
        shutil.copytree(head, broken)
        path = broken / ("config.json" if i % 2 else "model.safetensors")
        path.write_bytes(damaged(rng, path.read_bytes()))
        arguments = cascade("alone", {"eagle3": str(broken)}, small_vocabulary.mid)
        try:
            result = run_engine(
                {"model": small_vocabulary.target, **arguments}, {"greedy": JOBS["greedy"]}
            )
        except RuntimeError as error:
            assert_named(error, str(broken))
        else:
            loaded += 1
            assert result["greedy"]["outputs"] == plain["greedy"]["outputs"]
    assert 0 < loaded < 24
