"""The keys of method "hsd": each fault is one sentence that names the key."""

import json

import pytest

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.config.cascade_config import CascadeConfig, read_speculative_config
from vllm_hsd.errors import UserError
from vllm_hsd.levels import KINDS
from vllm_hsd.rules import MAX_KERNEL_DRAFT

MODEL = {"model": "small"}
LOW = {**MODEL, "num_tokens": 2}
TOP = {"model": "mid"}


def hsd(*levels, **keys) -> dict:
    return {"num_speculative_tokens": 6, "levels": list(levels), **keys}


def test_three_levels():
    parsed = CascadeConfig.parse(
        {
            "num_speculative_tokens": 12,
            "levels": [{"ngram": {"max": 4}, "num_tokens": 5}, {**MODEL, "num_tokens": 3}, TOP],
            "verifier": "standard",
        }
    )
    assert parsed.draft_lengths == [5, 3, 12]
    assert [level.kind for level in parsed.levels] == ["ngram", "model", "model"]
    assert parsed.verifier == "standard" and CascadeConfig.parse(hsd(TOP)).verifier == "block"


def test_adaptive_is_a_switch():
    assert [CascadeConfig.parse(hsd(TOP, adaptive=v)).adaptive for v in (False, True)] == [0, 1]


def test_dashes_and_per_model_keys_of_vllm():
    level = {"model": "m", "num-tokens": 2, "draft-tensor-parallel-size": 1, "revision": "main"}
    parsed = CascadeConfig.parse({"num-speculative-tokens": 6, "levels": [level, TOP]})
    assert parsed.levels[0].model_keys == {"draft_tensor_parallel_size": 1, "revision": "main"}
    assert parsed.levels[0].num_tokens == 2


# Keys, and what the message must say.
FAULTS = [
    ({"num_speculative_tokens": 6}, "'levels'"),
    (hsd(), r"levels: .*at least 1.*\[\]"),
    ({"num_speculative_tokens": 6, "levels": MODEL}, "levels: .*list"),
    ({"levels": [TOP]}, "'num_speculative_tokens'"),
    (hsd(TOP, num_speculative_tokens=None), "num_speculative_tokens: .*None"),
    (hsd(TOP, verifyer="standard"), "no key 'verifyer'; its keys are adaptive, cascade, "),
    (hsd(TOP, verifier="tokenwise"), "verifier: .*standard.*'tokenwise'"),
    (hsd({**MODEL, "num_token": 3}, TOP), r"levels\[0\].*'num_token'"),
    (hsd({"num_tokens": 3}, TOP), r"levels\[0\].*model, mtp, ngram"),
    (hsd({**MODEL, "ngram": {}, "num_tokens": 2}, TOP), r"levels\[0\].*'model'.*'ngr"),
    (hsd(MODEL, TOP), r"levels\[0\].*'num_tokens'"),
    (hsd({**MODEL, "num_tokens": 0}, TOP), r"levels\[0\]\.num_tokens"),
    # Optima of "Fast Inference via Hierarchical Speculative Decoding": 13 below 11, and 1 below 1.
    (
        hsd({**MODEL, "num_tokens": 13}, TOP, num_speculative_tokens=11),
        r"levels\[0\]\.num_tokens is 13.*11.*raise num_speculative_tokens to 14",
    ),
    (
        hsd({**MODEL, "num_tokens": 1}, TOP, num_speculative_tokens=1),
        r"levels\[1\] has room for one token.*raise num_speculative_tokens by 1, or remove",
    ),
    (hsd({**TOP, "num_tokens": 4}), r"levels\[0\]\.num_tokens is 4.*\(6"),
    (hsd({**TOP, "verifier": "standard"}), r"levels\[0\]\.verifier"),
    (hsd({**TOP, "max_rounds": 2}), r"levels\[0\]\.max_rounds"),
    (hsd({**TOP, "stopping": "wide"}), r"levels\[0\]\.stopping.*'wide'"),
    (hsd({**TOP, "temperature_scale": -1}), r"levels\[0\]\.temperature_scale"),
    (
        hsd({"ngram": {}, "num_tokens": 2, "revision": "x"}, TOP),
        r"levels\[0\] of kind 'ngram' has no key 'revision'; its keys are ngram, num_tokens",
    ),
    (
        hsd({"ngram": {"length": 2}, "num_tokens": 2}, TOP),
        r"levels\[0\]\.ngram .*'length'; its keys are max, min",
    ),
    (
        hsd({"ngram": {"min": 3, "max": 2}, "num_tokens": 2}, TOP),
        r"levels\[0\]\.ngram has min 3 above max 2",
    ),
    (
        hsd({"suffix": {"stores": "x"}}),
        r"levels\[0\]\.suffix .*'stores'; its keys are min_acceptance, shared_tokens, store",
    ),
    (hsd({"suffix": "x"}), r'suffix: give a mapping such as \{"store"'),
    (hsd(LOW, {"suffix": {}}), r"levels\[1\]\.suffix cannot verify"),
    (hsd({"sources": [{"max": 3}]}), r"sources\[0\] needs one of"),
    (
        hsd({"sources": [{"sources": [{"ngram": {}}]}]}),
        r"levels\[0\]\.sources\[0\] needs one of the kinds: bigram, .*, exit_head, model",
    ),
    (
        hsd({"sources": [{"ngram": {}, "revision": "x"}]}),
        r"levels\[0\]\.sources\[0\] of kind 'ngram' has no key 'revision'",
    ),
    (
        hsd({"sources": [{"ngram": {"length": 2}}]}),
        r"levels\[0\]\.sources\[0\]\.ngram .*'length'; its keys are max, min",
    ),
    (
        hsd({"sources": [MODEL, {"ngram": {}}]}),
        r"levels\[0\] has sources\[0\] of kind 'model' before others",
    ),
    (
        hsd({"sources": [{"ngram": {}, "num_tokens": 3}]}),
        r"sources\[0\]\.num_tokens, which a source does not take: remove it or give it to",
    ),
    (
        hsd({"sources": [{"ngram": {}}], "branches": 2, "num_tokens": 2}, {"model": "m"}),
        r"levels\[0\]\.branches is for a level alone, .*: remove it or the other levels\.",
    ),
    (hsd(LOW, {**TOP, "branches": 2}), r"levels\[1\]\.branches is for a level alone"),
    (
        hsd({**TOP, "branches": 2}, adaptive=True),
        r"levels\[0\]\.branches draws as many .*: remove one of them\.",
    ),
    (
        hsd({"sources": [{**MODEL, "branches": 2}]}),
        r"sources\[0\]\.branches, which a source does not take: remove it or give it to the level",
    ),
    (hsd({"sources": [{"ngram": {}}], "branches": 17}), r"branches: .*16"),
    (hsd(TOP, adaptive="on"), r"^adaptive must be true or false .*'on'"),
    (hsd(LOW, {"sources": [{"ngram": {}}]}), r"levels\[1\]\.sources cannot verify"),
    (hsd(LOW, {"ngram": {}}), r"levels\[1\]\.ngram"),
    (hsd(LOW, {"eagle3": "head"}), r"levels\[1\]\.eagle3 cannot verify levels\[0\].*put it first"),
    (hsd({"eagle3": ""}), r"levels\[0\]\.eagle3: .*''"),
    (
        hsd({"eagle3": "head", "num_tokens": 2, "verifier": "block"}, TOP),
        r"levels\[0\] of kind 'eagle3' has no key 'verifier'",
    ),
    (hsd({"ngram": 4, "num_tokens": 2}, TOP), r"ngram: give a mapping.*: 4"),
    (hsd({"early_exit": True}), r"levels\[0\]\.early_exit: .*True"),
    (hsd({"early_exit": 0}), r"levels\[0\]\.early_exit is 0, .*--layers 0` as exit_head"),
    (hsd({"early_exit": "half"}), r"levels\[0\]\.early_exit: .*'half'"),
    (hsd(LOW, TOP, horizontal_tokens=True), "horizontal_tokens: .*True"),
    (
        hsd({"ngram": {}, "num_tokens": 2, "stopping": "entropy"}, TOP),
        r"levels\[0\] of kind 'ngram' has no key 'stopping'",
    ),
    (
        {**hsd(TOP), "num-speculative-tokens": 3},
        "'num_speculative_tokens' twice, with a dash and with an underscore",
    ),
    (
        hsd({**MODEL, "num_tokens": 2, "num-tokens": 3}, TOP),
        r"levels\[0\] has the key 'num_tokens' twice",
    ),
    ({**hsd(TOP), 1: 2}, "has the key 1: keys must be text"),
    (
        hsd({**MODEL, "num_tokens": 1}, {**MODEL, "num_tokens": 1}, TOP),
        r"levels\[1\] has room for one token.*levels\[0\] would never.*levels\[1\]\.num_tokens",
    ),
    (
        hsd(LOW, {**MODEL, "num_tokens": 5}, LOW, TOP),
        r"levels\[1\] has room for one token.*raise levels\[2\]\.num_tokens",
    ),
    (
        hsd(LOW, TOP, horizontal_tokens=5),
        r"levels\[1\] has room for one token.*raise num_speculative_tokens",
    ),
    (hsd(TOP, horizontal_tokens=1), "horizontal_tokens.*remove it"),
    (hsd(LOW, TOP, horizontal_tokens=-1), "horizontal_tokens: .*-1"),
    (hsd(TOP, num_speculative_tokens=True), "num_speculative_tokens: .*True"),
    (hsd(TOP, num_speculative_tokens=64), "num_speculative_tokens: .*63"),
    (hsd(*[LOW] * 16, TOP), "levels: .*at most 16"),
    (hsd({"sources": [{"ngram": {}}] * 9}), r"sources: .*at most 8"),
    (hsd({"suffix": {"shared_tokens": 1 << 25}}), r"levels\[0\]\.suffix\.shared_tokens: "),
    (hsd({"suffix": {"min_acceptance": 1.5}}), r"levels\[0\]\.suffix\.min_acceptance: "),
    (hsd({"sources": [{"ngram": {}}], "min_acceptance": 2}), r"levels\[0\]\.min_acceptance: "),
    (
        hsd({"bigram": "s", "temperature_scale": 2}),
        r"levels\[0\] of kind 'bigram' has no key 'temperature_scale'",
    ),
    (hsd(LOW, {"bigram": "s"}), r"levels\[1\]\.bigram cannot verify"),
    (
        hsd({"sources": [{**MODEL, "max_rounds": 2}]}),
        r"sources\[0\]\.max_rounds, which a source does not take: remove it\.",
    ),
    (hsd({**TOP, "max_model_len": 0}), r"levels\[0\]\.max_model_len: "),
    (
        hsd(LOW, {**TOP, "verifier": "none"}, adaptive=True),
        r"levels\[1\]\.verifier is \"none\", and 'adaptive' goes by .*: remove one",
    ),
    (
        hsd({"sources": [{"ngram": {}}], "num_tokens": 2}, {**TOP, "verifier": "none"}),
        r'levels\[1\]\.verifier is "none", and levels\[0\]\.sources are chosen by',
    ),
    (hsd(TOP, verifier="none"), "verifier: .*'none'"),
    (hsd(LOW, {**TOP, "verifier": "coupled"}), r"levels\[1\]\.verifier: .*'coupled'"),
    ({"cascade": None}, "cascade is None: give the path"),
    ({"cascade": "nowhere.json"}, r"cascade: no file 'nowhere\.json'"),
    (hsd(TOP, cascade="nowhere.json"), "'cascade' and 'levels'"),
]


def is_one_sentence(message: str) -> bool:
    return message.endswith(".") and "\n" not in message and len(message) < 400


@pytest.mark.parametrize(("keys", "said"), FAULTS)
def test_a_fault_is_one_sentence_that_names_the_key(keys, said):
    with pytest.raises(UserError, match=said) as error:
        CascadeConfig.parse(keys)
    assert is_one_sentence(str(error.value)), error.value


@pytest.mark.parametrize(
    "written",
    ["{", "[]", '{"levels": []}', '{"schema": 2, "levels": []}'],
    ids=["not JSON", "not a mapping", "no schema", "another schema"],
)
def test_files_that_are_not_cascades(tmp_path, written):
    path = tmp_path / "cascade.json"
    path.write_text(written)
    with pytest.raises(UserError, match="cascade: ") as error:
        CascadeConfig.parse({"cascade": str(path)})
    assert is_one_sentence(str(error.value))


def test_keys_next_to_a_cascade_file_win(tmp_path):
    path = tmp_path / "cascade.json"
    path.write_text(json.dumps({"schema": 1, "note": "ignored", **hsd(TOP, verifier="standard")}))
    assert CascadeConfig.parse({"cascade": str(path)}) == CascadeConfig.parse(
        hsd(TOP, verifier="standard")
    )
    given = CascadeConfig.parse({"cascade": str(path), "num_speculative_tokens": 3})
    assert given.num_speculative_tokens == 3 and given.verifier == "standard"


def test_faults_in_a_cascade_file_name_the_file(tmp_path):
    path = tmp_path / "cascade.json"
    path.write_text(json.dumps({"schema": 1, **hsd({**TOP, "temperature_scale": 0})}))
    with pytest.raises(UserError, match=r"^cascade '.*json': levels\[0\]\.temperature_scale"):
        CascadeConfig.parse({"cascade": str(path)})
    with pytest.raises(UserError, match=r"^num_speculative_tokens: "):
        CascadeConfig.parse({"cascade": str(path), "num_speculative_tokens": 0})


@pytest.mark.parametrize("raw", [[1], "hsd", 7, {1: 2}, {"a-b": 1, "a_b": 2}])
def test_speculative_config_that_is_not_a_mapping_with_text_keys(raw):
    with pytest.raises(UserError, match=r"^speculative_config ") as error:
        read_speculative_config(raw)
    assert is_one_sentence(str(error.value))


def test_speculative_config_with_dashes():
    given = {"method": "hsd", "num-speculative-tokens": 3, "nested": {"a-b": 1}}
    wanted = {"method": "hsd", "num_speculative_tokens": 3, "nested": {"a-b": 1}}
    assert read_speculative_config(given) == wanted
    assert read_speculative_config(None) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_answers_what_a_runner_asks(kind):
    values = {"early_exit": 2, "ngram": {}, "suffix": {}, "prediction": {}, "mtp": {}}
    values["sources"] = [{"ngram": {}}]
    value = values.get(kind, "path")
    (level,) = CascadeConfig.parse(hsd({kind: value})).levels
    assert level.kind == kind and getattr(level, kind) is not None
    assert level.options(6, "standard") == LevelOptions(6, "standard")


def test_the_longest_draft_is_what_the_verification_kernel_takes():
    """`levels` imports no torch, and so not `rules`."""
    longest = CascadeConfig.model_json_schema()["properties"]["num_speculative_tokens"]["maximum"]
    assert longest == MAX_KERNEL_DRAFT
