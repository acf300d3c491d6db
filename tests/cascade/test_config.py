"""The keys of method "hsd": each fault is one sentence that names the key."""

import json

import pytest
from support.damaged_bytes import sentence_objection

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.config.cascade_config import CascadeConfig, read_speculative_config
from vllm_hsd.errors import UserError
from vllm_hsd.levels import KINDS
from vllm_hsd.rules import MAX_KERNEL_DRAFT

MODEL, NGRAM = {"model": "small"}, {"ngram": {}}
ONE, LOW = {**MODEL, "num_tokens": 1}, {**MODEL, "num_tokens": 2}
TOP = {"model": "mid"}


def hsd(*levels, **keys) -> dict:
    return {"num_speculative_tokens": 6, "levels": list(levels), **keys}


def sources(*each: dict, **keys) -> dict:
    return {"sources": list(each), **keys}


def test_three_levels():
    levels = {"ngram": {"max": 4}, "num_tokens": 5}, {**MODEL, "num_tokens": 3}, TOP
    given = hsd(*levels, num_speculative_tokens=12, verifier="standard")
    parsed = CascadeConfig.parse(given)
    assert parsed.draft_lengths == [5, 3, 12]
    assert [level.kind for level in parsed.levels] == ["ngram", "model", "model"]
    assert parsed.verifier == "standard" and CascadeConfig.parse(hsd(TOP)).verifier == "block"


def test_dashes_and_per_model_keys_of_vllm():
    level = {"model": "m", "num-tokens": 2, "draft-tensor-parallel-size": 1, "revision": "main"}
    parsed = CascadeConfig.parse({"num-speculative-tokens": 6, "levels": [level, TOP]})
    assert parsed.levels[0].model_keys == {"draft_tensor_parallel_size": 1, "revision": "main"}
    assert parsed.levels[0].num_tokens == 2


# A level alone, and what the message must say of it after its name.
ALONE = [
    ({**TOP, "num_tokens": 4}, r"\.num_tokens is 4.*\(6"),
    ({**TOP, "verifier": "standard"}, r"\.verifier"),
    ({**TOP, "max_rounds": 2}, r"\.max_rounds"),
    ({**TOP, "stopping": "wide"}, r"\.stopping.*'wide'"),
    ({**TOP, "temperature_scale": -1}, r"\.temperature_scale"),
    ({**TOP, "max_model_len": 0}, r"\.max_model_len: "),
    ({**NGRAM, "revision": "x"}, ".* has no key 'revision'; its keys are ngram, num_tokens"),
    ({**NGRAM, "stopping": "entropy"}, " of kind 'ngram' has no key 'stopping'"),
    ({"ngram": {"length": 2}}, r"\.ngram .*'length'; its keys are max, min"),
    ({"ngram": {"min": 3, "max": 2}}, r"\.ngram has min 3 above max 2"),
    ({"ngram": 4}, r"\.ngram: give a mapping.*: 4"),
    ({"suffix": {"stores": "x"}}, r"\.suffix .*'stores'; .* min_acceptance, shared_tokens, store"),
    ({"suffix": "x"}, r'\.suffix: give a mapping such as \{"store"'),
    ({"suffix": {"min_acceptance": 1.5}}, r"\.suffix\.min_acceptance: "),
    ({"bigram": "s", "temperature_scale": 2}, " of kind 'bigram' has no key 'temperature_scale'"),
    ({"eagle3": "head", "verifier": "block"}, " of kind 'eagle3' has no key 'verifier'"),
    ({"eagle3": "head", "branches": 2}, " of kind 'eagle3' has no key 'branches'"),
    ({"eagle3": ""}, r"\.eagle3: .*''"),
    ({"sufix": {}}, r" needs one of the kinds: .* \(given: 'sufix'\)"),
    ({}, r" needs one of the kinds: .* \(given: no key\)"),
    ({"early_exit": True}, r"\.early_exit: .*True"),
    ({"early_exit": 0}, r"\.early_exit is 0, .*--layers 0` as exit_head"),
    ({"early_exit": "half"}, r"\.early_exit: .*'half'"),
    (sources(sources(NGRAM)), r"\.sources\[0\] needs one of the kinds: bigram, .*exit_head, model"),
    (sources({**sources(NGRAM), **NGRAM}), r"\.sources\[0\] of kind 'ngram' has no key 'sources'"),
    ({"prediction": {"max": 3}}, r"\.prediction has no key 'max'; it has none: leave it empty"),
    (sources({**NGRAM, "revision": "x"}), r"\.sources\[0\] of kind 'ngram' has no key 'revision'"),
    (sources({"ngram": {"length": 2}}), r"\.sources\[0\]\.ngram .*'length'; its keys are max, min"),
    (sources({"suffix": {"shared_tokens": 1 << 19}}), r"\.sources\[0\]\.suffix\.shared_tokens: "),
    (sources(MODEL), " has one source, of kind 'model', and no lookup .* keys to the level"),
    (sources(MODEL, NGRAM), r" has sources\[0\] of kind 'model' before others"),
    *(
        (sources({**MODEL, key: 2}), rf" has sources\[0\]\.{key}, .* does not take: remove it{fix}")
        for key, fix in (
            ("num_tokens", " or give it to the level"),
            ("branches", " or give it to the level"),
            ("max_rounds", r"\."),
        )
    ),
    (sources(NGRAM, MODEL, branches=2), " has branches, which .* sources that are all lookups"),
    (sources(NGRAM, branches=17), r"\.branches: .*16"),
    (sources(*[NGRAM] * 9), r"\.sources: .*at most 8"),
    (sources(NGRAM, min_acceptance=2), r"\.min_acceptance: "),
]
# Keys, and what the message must say.
FAULTS = [
    *((hsd(level), rf"levels\[0\]{said}") for level, said in ALONE),
    *((raw, "^speculative_config is .*: give a mapping") for raw in ([1], "hsd", 7)),
    ({**hsd(TOP), 1: 2}, "^speculative_config has the key 1: keys must be printable text"),
    (
        {**hsd(TOP), "\ud800": 2},
        r"^speculative_config has the key '.ud800': keys must be printable",
    ),
    (
        {**hsd(TOP), "num-speculative-tokens": 3},
        "^speculative_config .* 'num_speculative_tokens' twice, with a dash and with an underscore",
    ),
    ({"num_speculative_tokens": 6}, "'levels'"),
    (hsd(), r"levels: .*at least 1.*\[\]"),
    ({"num_speculative_tokens": 6, "levels": MODEL}, "levels: .*list"),
    ({"num_speculative_token": 6, "levels": [TOP]}, "no key 'num_speculative_token'; its keys"),
    ({"levels": [TOP]}, "'num_speculative_tokens'"),
    (hsd(TOP, num_speculative_tokens=None), "num_speculative_tokens: .*None"),
    (hsd(TOP, num_speculative_tokens=True), "num_speculative_tokens: .*True"),
    (hsd(TOP, num_speculative_tokens=64), "num_speculative_tokens: .*63"),
    (hsd(TOP, verifyer="standard"), "no key 'verifyer'; its keys are adaptive, cascade, "),
    (hsd(TOP, verifier="tokenwise"), "verifier: .*standard.*'tokenwise'"),
    (hsd(TOP, verifier="none"), "verifier: .*'none'"),
    (hsd(TOP, adaptive="on"), r"^adaptive must be true or false .*'on'"),
    (hsd(TOP, adaptive=True, enable_adaptive_verification=True), "which adaptive chooses too"),
    (hsd(sources(NGRAM, branches=2), enable_adaptive_verification=True), "which branches chooses"),
    (hsd(TOP, horizontal_tokens=1), "horizontal_tokens.*remove it"),
    (hsd(LOW, TOP, horizontal_tokens=-1), "horizontal_tokens: .*-1"),
    (hsd(LOW, TOP, horizontal_tokens=True), "horizontal_tokens: .*True"),
    (hsd(*[LOW] * 16, TOP), "levels: .*at most 16"),
    (hsd({**MODEL, "num_token": 3}, TOP), r"levels\[0\].*'num_token'"),
    (hsd({**LOW, "num-tokens": 3}, TOP), r"levels\[0\] has the key 'num_tokens' twice"),
    (hsd({"num_tokens": 3}, TOP), r"levels\[0\].*model, mtp, ngram"),
    (hsd({**LOW, **NGRAM}, TOP), r"levels\[0\].*'model'.*'ngr"),
    (hsd(MODEL, TOP), r"levels\[0\].*'num_tokens'"),
    (hsd({**MODEL, "num_tokens": 0}, TOP), r"levels\[0\]\.num_tokens"),
    # Optima of "Fast Inference via Hierarchical Speculative Decoding": 13 below 11, and 1 below 1.
    (
        hsd({**MODEL, "num_tokens": 13}, TOP, num_speculative_tokens=11),
        r"levels\[0\]\.num_tokens is 13.*11.*raise num_speculative_tokens to 14",
    ),
    *(
        (keys, rf"levels\[1\] has room for one token.*{fix}")
        for keys, fix in (
            (
                hsd(ONE, TOP, num_speculative_tokens=1),
                "raise num_speculative_tokens by 1, or remove",
            ),
            (hsd(ONE, ONE, TOP), r"levels\[0\] would never.*levels\[1\]\.num_tokens"),
            (hsd(LOW, {**MODEL, "num_tokens": 5}, LOW, TOP), r"raise levels\[2\]\.num_tokens"),
            (hsd(LOW, TOP, horizontal_tokens=5), "raise num_speculative_tokens"),
        )
    ),
    *(
        (hsd(LOW, level), rf"\[1\]\.{next(iter(level))} cannot verify levels\[0\].*put it first")
        for level in (NGRAM, {"suffix": {}}, {"bigram": "s"}, sources(NGRAM), {"eagle3": "head"})
    ),
    (
        hsd(sources(NGRAM, branches=2, num_tokens=2), TOP),
        r"levels\[0\]\.branches is for a level alone, .*: remove it or the other levels\.",
    ),
    (hsd(LOW, {**TOP, "branches": 2}), r"levels\[1\]\.branches is for a level alone"),
    (
        hsd({**TOP, "branches": 2}, adaptive=True),
        r"levels\[0\]\.branches draws as many .*: remove one of them\.",
    ),
    (
        hsd(LOW, {**TOP, "verifier": "none"}, adaptive=True),
        r"levels\[1\]\.verifier is \"none\", and 'adaptive' goes by .*: remove one",
    ),
    (
        hsd(sources(NGRAM, num_tokens=2), {**TOP, "verifier": "none"}),
        r'levels\[1\]\.verifier is "none", and levels\[0\]\.sources are chosen by',
    ),
    (hsd(LOW, {**TOP, "verifier": "coupled"}), r"levels\[1\]\.verifier: .*'coupled'"),
    ({"cascade": None}, "cascade is None: give the path"),
    ({"cascade": "nowhere.json"}, r"cascade: no file 'nowhere\.json'"),
    (hsd(TOP, cascade="nowhere.json"), "'cascade' and 'levels'"),
]


@pytest.mark.parametrize(("keys", "said"), FAULTS)
def test_a_fault_is_one_sentence_that_names_the_key(keys, said):
    with pytest.raises(UserError, match=said) as error:
        CascadeConfig.parse(keys)
    assert sentence_objection(str(error.value), "", 400) is None


def test_keys_next_to_a_cascade_file_win(tmp_path):
    path, wanted = tmp_path / "cascade.json", hsd(TOP, verifier="standard")
    path.write_text(json.dumps({"schema": 1, "planned_for": {"target": "m"}, **wanted}))
    for keys in ({}, {"num_speculative_tokens": 3}):
        found = CascadeConfig.parse({"cascade": str(path), **keys})
        assert found == CascadeConfig.parse({**wanted, **keys})


def test_faults_in_a_cascade_file_name_the_file(tmp_path):
    path = tmp_path / "cascade.json"
    path.write_text(json.dumps({"schema": 1, **hsd({**TOP, "temperature_scale": 0})}))
    with pytest.raises(UserError, match=r"^cascade '.*json': levels\[0\]\.temperature_scale"):
        CascadeConfig.parse({"cascade": str(path)})
    with pytest.raises(UserError, match=r"^num_speculative_tokens: "):
        CascadeConfig.parse({"cascade": str(path), "num_speculative_tokens": 0})


def test_speculative_config_with_dashes():
    given = {"method": "hsd", "num-speculative-tokens": 3, "nested": {"a-b": 1}}
    wanted = {"method": "hsd", "num_speculative_tokens": 3, "nested": {"a-b": 1}}
    assert read_speculative_config(given) == wanted
    assert read_speculative_config(None) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_answers_what_a_runner_asks(kind):
    value = {} if KINDS[kind].value_keys else {"early_exit": 2, **sources(NGRAM)}.get(kind, "path")
    (level,) = CascadeConfig.parse(hsd({kind: value})).levels
    assert level.kind == kind and getattr(level, kind) is not None
    assert level.options(6, "standard") == LevelOptions(6, "standard")


def test_the_longest_draft_is_what_the_verification_kernel_takes():
    """`levels` imports no torch, and so not `rules`."""
    longest = CascadeConfig.model_json_schema()["properties"]["num_speculative_tokens"]["maximum"]
    assert longest == MAX_KERNEL_DRAFT
