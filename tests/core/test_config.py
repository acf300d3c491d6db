"""The keys of method "hsd": each fault is one sentence that names the key."""

import json

import pytest

from vllm_hsd.config import CascadeConfig, read_speculative_config
from vllm_hsd.core.levels import LevelOptions
from vllm_hsd.errors import UserError
from vllm_hsd.levels import KINDS

MODEL = {"model": "small"}
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


# name -> (keys, what the message must say)
FAULTS = {
    "no levels": ({"num_speculative_tokens": 6}, "'levels'"),
    "levels empty": (hsd(), r"levels: .*at least 1.*\[\]"),
    "levels not a list": ({"num_speculative_tokens": 6, "levels": MODEL}, "levels: .*list"),
    "no num_speculative_tokens": ({"levels": [TOP]}, "'num_speculative_tokens'"),
    "num_speculative_tokens null": (
        hsd(TOP, num_speculative_tokens=None),
        "num_speculative_tokens: .*None",
    ),
    "num_speculative_tokens zero": (hsd(TOP, num_speculative_tokens=0), "num_speculative_tokens: "),
    "num_speculative_tokens text": (hsd(TOP, num_speculative_tokens="x"), "num_speculative_tokens"),
    "unknown key": (
        hsd(TOP, verifyer="standard"),
        "no key 'verifyer'; its keys are adaptive, cascade, ",
    ),
    "key of another method": (hsd(TOP, prompt_lookup_max=3), "'prompt_lookup_max'"),
    "unknown verifier": (hsd(TOP, verifier="tokenwise"), "verifier: .*standard.*'tokenwise'"),
    "unknown key in a level": (hsd({**MODEL, "num_token": 3}, TOP), r"levels\[0\].*'num_token'"),
    "level not a mapping": (hsd("small"), r"levels\[0\]"),
    "no kind": (hsd({"num_tokens": 3}, TOP), r"levels\[0\].*model, ngram"),
    "two kinds": (hsd({**MODEL, "ngram": {}, "num_tokens": 2}, TOP), r"levels\[0\].*'model'.*'ngr"),
    "no num_tokens": (hsd(MODEL, TOP), r"levels\[0\].*'num_tokens'"),
    "num_tokens zero": (hsd({**MODEL, "num_tokens": 0}, TOP), r"levels\[0\]\.num_tokens"),
    "num_tokens above": (hsd({**MODEL, "num_tokens": 7}, TOP), r"levels\[0\]\.num_tokens is 7.*6"),
    "num_tokens of the last": (hsd({**TOP, "num_tokens": 4}), r"levels\[0\]\.num_tokens is 4.*\(6"),
    "verifier of the first": (hsd({**TOP, "verifier": "standard"}), r"levels\[0\]\.verifier"),
    "max_rounds of the first": (hsd({**TOP, "max_rounds": 2}), r"levels\[0\]\.max_rounds"),
    "unknown stopping rule": (hsd({**TOP, "stopping": "wide"}), r"levels\[0\]\.stopping.*'wide'"),
    "negative temperature_scale": (
        hsd({**TOP, "temperature_scale": -1}),
        r"levels\[0\]\.temperature_scale",
    ),
    "key of models": (
        hsd({"ngram": {}, "num_tokens": 2, "revision": "x"}, TOP),
        r"levels\[0\] of kind 'ngram' has no key 'revision'; its keys are ngram, num_tokens",
    ),
    "unknown key of ngram": (
        hsd({"ngram": {"length": 2}, "num_tokens": 2}, TOP),
        r"levels\[0\]\.ngram .*'length'; its keys are max, min",
    ),
    "ngram min above max": (
        hsd({"ngram": {"min": 3, "max": 2}, "num_tokens": 2}, TOP),
        r"levels\[0\]\.ngram has min 3 above max 2",
    ),
    "unknown key of suffix": (
        hsd({"suffix": {"stores": "x"}}),
        r"levels\[0\]\.suffix .*'stores'; its keys are min_acceptance, shared_tokens, store",
    ),
    "suffix not a mapping": (hsd({"suffix": "x"}), r'suffix: give a mapping such as \{"store"'),
    "suffix above a model": (
        hsd({**MODEL, "num_tokens": 2}, {"suffix": {}}),
        r"levels\[1\]\.suffix cannot verify",
    ),
    "no sources": (hsd({"sources": []}), r"levels\[0\]\.sources: .*at least 1"),
    "one source for a list": (hsd({"sources": {"ngram": {}}}), r"levels\[0\]\.sources: .*list"),
    "source without a kind": (hsd({"sources": [{"max": 3}]}), r"sources\[0\] needs one of"),
    "sources in a source": (
        hsd({"sources": [{"sources": [{"ngram": {}}]}]}),
        r"levels\[0\]\.sources\[0\] needs one of the kinds: bigram, .*, exit_head, model",
    ),
    "unknown key of a source": (
        hsd({"sources": [{"ngram": {}, "revision": "x"}]}),
        r"levels\[0\]\.sources\[0\] of kind 'ngram' has no key 'revision'",
    ),
    "unknown key of a source's value": (
        hsd({"sources": [{"ngram": {"length": 2}}]}),
        r"levels\[0\]\.sources\[0\]\.ngram .*'length'; its keys are max, min",
    ),
    "model before a lookup": (
        hsd({"sources": [MODEL, {"ngram": {}}]}),
        r"levels\[0\] has sources\[0\] of kind 'model' before others",
    ),
    "num_tokens of a source": (
        hsd({"sources": [{"ngram": {}, "num_tokens": 3}]}),
        r"sources\[0\]\.num_tokens, which a source does not take: remove it or give it to",
    ),
    "branches": (
        hsd({"sources": [{"ngram": {}}], "branches": 2}),
        r"levels\[0\] has branches above 1, which no runner serves yet: remove it\.",
    ),
    "17 branches": (hsd({"sources": [{"ngram": {}}], "branches": 17}), r"branches: .*16"),
    "adaptive a word": (hsd(TOP, adaptive="on"), r"^adaptive must be true or false .*'on'"),
    "adaptive a number": (hsd(TOP, adaptive=1), r"^adaptive must be true or false .*: 1"),
    "adaptive a mapping": (hsd(TOP, adaptive={"depth": 1}), r"^adaptive must be true or false"),
    "adaptive head below a model": (
        hsd({"eagle3": "head", "num_tokens": 2}, TOP, adaptive=True),
        r"levels\[0\] has an EAGLE-3 head, .*remove the other levels or 'adaptive'",
    ),
    "sources above a model": (
        hsd({**MODEL, "num_tokens": 2}, {"sources": [{"ngram": {}}]}),
        r"levels\[1\]\.sources cannot verify",
    ),
    "ngram above a model": (hsd({**MODEL, "num_tokens": 2}, {"ngram": {}}), r"levels\[1\]\.ngram"),
    "eagle3 above a model": (
        hsd({**MODEL, "num_tokens": 2}, {"eagle3": "head"}),
        r"levels\[1\]\.eagle3 cannot verify levels\[0\].*put it first",
    ),
    "eagle3 empty": (hsd({"eagle3": ""}), r"levels\[0\]\.eagle3: .*''"),
    "verifier of eagle3": (
        hsd({"eagle3": "head", "num_tokens": 2, "verifier": "block"}, TOP),
        r"levels\[0\] of kind 'eagle3' has no key 'verifier'",
    ),
    "ngram not a mapping": (hsd({"ngram": 4, "num_tokens": 2}, TOP), r"ngram: give a mapping.*: 4"),
    "ngram a switch": (hsd({"ngram": True, "num_tokens": 2}, TOP), r"levels\[0\]\.ngram: .*True"),
    "early_exit a switch": (hsd({"early_exit": True}), r"levels\[0\]\.early_exit: .*True"),
    "early_exit a word": (hsd({"early_exit": "half"}), r"levels\[0\]\.early_exit: .*'half'"),
    "early_exit zero": (hsd({"early_exit": 0}), r"levels\[0\]\.early_exit: "),
    "horizontal tokens a switch": (
        hsd({**MODEL, "num_tokens": 2}, TOP, horizontal_tokens=True),
        "horizontal_tokens: .*True",
    ),
    "model empty": (hsd({"model": ""}), r"levels\[0\]\.model: .*''"),
    "max_rounds zero": (
        hsd({**MODEL, "num_tokens": 2}, {**TOP, "max_rounds": 0}),
        r"levels\[1\]\.max_rounds",
    ),
    "infinite temperature_scale": (
        hsd({**TOP, "temperature_scale": float("inf")}),
        r"levels\[0\]\.temperature_scale",
    ),
    "stopping of ngram": (
        hsd({"ngram": {}, "num_tokens": 2, "stopping": "entropy"}, TOP),
        r"levels\[0\] of kind 'ngram' has no key 'stopping'",
    ),
    "tiny temperature_scale": (
        hsd({**TOP, "temperature_scale": 1e-320}),
        r"levels\[0\]\.temperature_scale: .*1e-320",
    ),
    "a key with a dash and an underscore": (
        {**hsd(TOP), "num-speculative-tokens": 3},
        "'num_speculative_tokens' twice, with a dash and with an underscore",
    ),
    "a level's key with a dash and an underscore": (
        hsd({**MODEL, "num_tokens": 2, "num-tokens": 3}, TOP),
        r"levels\[0\] has the key 'num_tokens' twice",
    ),
    "key that is not text": ({**hsd(TOP), 1: 2}, "has the key 1: keys must be text"),
    "a level's key that is not text": (hsd({**TOP, 1: 2}), r"levels\[0\] has the key 1: keys"),
    "integer of 6000 digits": (
        hsd(TOP, num_speculative_tokens=10**6000),
        "num_speculative_tokens: .*an integer of 19932 bits",
    ),
    "long texts": (hsd(TOP, **{"k" * 100_000: "v" * 100_000}), "has no key 'kkk"),
    "cascade path of 5000 characters": ({"cascade": "x" * 5000}, "cascade: no file 'xxx"),
    "no room below": (
        hsd({**MODEL, "num_tokens": 1}, {**MODEL, "num_tokens": 1}, TOP),
        r"levels\[1\] has room for one token.*levels\[0\] would never.*levels\[1\]\.num_tokens",
    ),
    "no room two levels below": (
        hsd(
            {**MODEL, "num_tokens": 2}, {**MODEL, "num_tokens": 5}, {**MODEL, "num_tokens": 2}, TOP
        ),
        r"levels\[1\] has room for one token.*raise levels\[2\]\.num_tokens",
    ),
    "no room next to horizontal tokens": (
        hsd({**MODEL, "num_tokens": 2}, TOP, horizontal_tokens=5),
        r"levels\[1\] has room for one token.*raise num_speculative_tokens",
    ),
    "horizontal tokens of one level": (
        hsd(TOP, horizontal_tokens=1),
        "horizontal_tokens.*remove it",
    ),
    "negative horizontal tokens": (
        hsd({**MODEL, "num_tokens": 2}, TOP, horizontal_tokens=-1),
        "horizontal_tokens: .*-1",
    ),
    "too many horizontal tokens": (
        hsd({**MODEL, "num_tokens": 2}, TOP, horizontal_tokens=6),
        r"horizontal_tokens \(6\)",
    ),
    "num_speculative_tokens a switch": (
        hsd(TOP, num_speculative_tokens=True),
        "num_speculative_tokens: .*True",
    ),
    "num_speculative_tokens too large": (
        hsd(TOP, num_speculative_tokens=129),
        "num_speculative_tokens: .*128",
    ),
    "17 levels": (hsd(*[{**MODEL, "num_tokens": 2}] * 16, TOP), "levels: .*at most 16"),
    "9 sources": (hsd({"sources": [{"ngram": {}}] * 9}), r"sources: .*at most 8"),
    "too many shared tokens": (
        hsd({"suffix": {"shared_tokens": 1 << 25}}),
        r"levels\[0\]\.suffix\.shared_tokens: ",
    ),
    "a share above 1": (
        hsd({"suffix": {"min_acceptance": 1.5}}),
        r"levels\[0\]\.suffix\.min_acceptance: ",
    ),
    "a share of sources above 1": (
        hsd({"sources": [{"ngram": {}}], "min_acceptance": 2}),
        r"levels\[0\]\.min_acceptance: ",
    ),
    "order too large": (hsd({"ngram_model": "s", "order": 7}), r"levels\[0\]\.order: .*: 7"),
    "temperature_scale of bigram": (
        hsd({"bigram": "s", "temperature_scale": 2}),
        r"levels\[0\] of kind 'bigram' has no key 'temperature_scale'",
    ),
    "bigram above a model": (
        hsd({**MODEL, "num_tokens": 2}, {"bigram": "s"}),
        r"levels\[1\]\.bigram cannot verify",
    ),
    "max_rounds of a source": (
        hsd({"sources": [{**MODEL, "max_rounds": 2}]}),
        r"sources\[0\]\.max_rounds, which a source does not take: remove it\.",
    ),
    "max_model_len zero": (hsd({**TOP, "max_model_len": 0}), r"levels\[0\]\.max_model_len: "),
    "level's verifier unknown": (
        hsd({**MODEL, "num_tokens": 2}, {**TOP, "verifier": "coupled"}),
        r"levels\[1\]\.verifier: .*'coupled'",
    ),
    "cascade not a path": ({"cascade": None}, "cascade is None: give the path"),
    "no cascade file": ({"cascade": "nowhere.json"}, r"cascade: no file 'nowhere\.json'"),
    "cascade and levels": (hsd(TOP, cascade="nowhere.json"), "'cascade' and 'levels'"),
}


def is_one_sentence(message: str) -> bool:
    return message.endswith(".") and "\n" not in message and len(message) < 400


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_sentence_that_names_the_key(fault):
    keys, said = FAULTS[fault]
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
    values = {"early_exit": 2, "ngram": {}, "suffix": {}, "sources": [{"ngram": {}}]}
    value = values.get(kind, "path")
    (level,) = CascadeConfig.parse(hsd({kind: value})).levels
    assert level.kind == kind and getattr(level, kind) is not None
    assert level.options(6, "standard") == LevelOptions(6, "standard")
