"""What of a configuration reaches vLLM and the levels, and what is refused in one sentence."""

import functools
import operator
import pickle
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import cascades
from support.damage import change_config, damaged_copy
from support.engines import configure
from support.level_files import EVERY_KIND, filled
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

from vllm_hsd.cascade.text_store import collect_texts, write_store
from vllm_hsd.config.level_checks import target_mistakes
from vllm_hsd.errors import UserError
from vllm_hsd.host import engine_hooks, graphs, program_models
from vllm_hsd.host.replacements import load_model
from vllm_hsd.levels.base import KINDS, LevelConfig, VllmModelKeys

STATES = "eagle_aux_hidden_state_layer_ids"


def hsd(*levels: dict, **keys) -> dict:
    return {"method": "hsd", "num_speculative_tokens": 3, "levels": list(levels), **keys}


def sources(*each: dict, **keys) -> dict:
    return {"sources": list(each), **keys}


def stock(method: str, **keys) -> dict:
    verifier = {"rejection_sample_method": "hierarchical"}
    return {"method": method, "num_speculative_tokens": 3, **verifier, **keys}


def test_vllm_sees_its_own_block_verification(family):
    """Also in the processes that receive the configuration."""
    for method in ("standard", "block", "hierarchical"):
        given = stock("ngram", prompt_lookup_max=3, rejection_sample_method=method)
        found = pickle.loads(pickle.dumps(configure(family, given).speculative_config))
        assert found.rejection_sample_method == ("standard" if method == "standard" else "block")
        assert isinstance(found, engine_hooks.NeedsHooks) == (method == "hierarchical")


NGRAM, EXIT = {"ngram": {}}, {"early_exit": 1}
# Names in capitals stand for `files`.
EAGLE3, SMALL = {"eagle3": "HEAD"}, {"model": "SMALL"}
LOOKUP, PAIR = hsd(NGRAM), sources(NGRAM, EAGLE3)
SERVED = [
    LOOKUP,
    hsd({"suffix": {}}),
    hsd({"bigram_model": "STORE"}),
    hsd({"suffix": {"shared_tokens": 1 << 18}}),
    hsd(sources(NGRAM, {"suffix": {}})),
    hsd(sources(NGRAM, EXIT)),
    hsd(PAIR),
    hsd(sources(NGRAM, EAGLE3, num_tokens=1), EXIT),
    hsd({**EAGLE3, "num_tokens": 1}, EXIT),
    hsd(sources(NGRAM, branches=2)),
    hsd(sources(NGRAM, branches=2), adaptive=True),
    hsd({**NGRAM, "num_tokens": 1}, {**EXIT, "verifier": "none"}),
    hsd({**EXIT, "stopping": "entropy"}),
    hsd({**SMALL, "max_model_len": 99}),
    hsd({**SMALL, "branches": 3}),
    hsd({**SMALL, "branches": 3}, verifier="coupled"),
    hsd(EAGLE3, verifier="coupled"),
    stock("ngram", prompt_lookup_max=3),
]
# With further arguments of the engine.
REFUSED = [
    (hsd(PAIR, adaptive=True), {}, r"adaptive has no meaning .* levels\[0\].sources\[1\].eagle3"),
    (hsd(EAGLE3, verifier="standard"), {}, "verifier has no meaning"),
    (
        hsd(NGRAM, adaptive=True),
        {"distributed_executor_backend": "external_launcher"},
        "adaptive does not run with external_launcher",
    ),
    (LOOKUP, {"enable_dbo": True}, "dual batch overlap does not run with speculation"),
    (
        hsd({**SMALL, "branches": 9}, num_speculative_tokens=8),
        {},
        "make 72 draft tokens of a request, but tree verification takes at most 64",
    ),
    (
        hsd({**SMALL, "branches": 2}, verifier="standard"),
        {},
        r"verifier does not go with levels\[0\].branches of a model",
    ),
    (
        hsd({**SMALL, "branches": 2, "stopping": "entropy"}),
        {},
        r"levels\[0\].stopping does not go with levels\[0\].branches of a model",
    ),
    ({**LOOKUP, "method": "hds"}, {}, r"'levels', which needs .*\"hsd\" \(given: 'hds'\)\.$"),
    ({**LOOKUP, "method": None}, {}, r"'levels', which needs .*\"hsd\" \(given: None\)\.$"),
    (stock("suffix"), {}, "works with the methods .*, not with 'suffix'"),
    (stock("custom_class", model="a.B"), {}, "works with the methods"),
    (stock("ngram", num_speculative_tokens=64), {}, "num_speculative_tokens is 64, above"),
    (stock("ngram", enable_adaptive_verification=True), {}, "probabilities, which 'ngram' is not"),
    (stock("ngram", levls=[]), {}, r"^vLLM refuses levls: [^\n]*\.$"),
    (stock("ngram", num_speculative_tokens=-2), {}, r"^vLLM refuses num_spec\w*_tokens: [^\n]*\.$"),
]


@pytest.fixture(scope="module")
def head(family) -> str:
    return cascades.head(family)


@pytest.fixture(scope="module")
def files(family, head) -> dict[str, str]:
    store = str(Path(family.target).with_name("pairs.safetensors"))
    write_store(collect_texts([np.arange(3)], family.vocabulary), store)
    return {"HEAD": head, "SMALL": family.small, "STORE": store}


def test_engines_are_tested_with_every_kind():
    """But for what a request brings, and what a target does."""
    assert set(EVERY_KIND) == KINDS.keys() - {"prediction", "mtp"}


@pytest.mark.parametrize("given", SERVED)
def test_a_configuration_is_served(as_on_gpus, family, files, given):
    config = configure(family, filled(given, files))
    assert config.use_v2_model_runner
    couples_all = pickle.loads(pickle.dumps(config.speculative_config)).hsd_couples_all
    assert couples_all == ("verifier" in given)


@pytest.mark.parametrize(("given", "engine", "reason"), REFUSED)
def test_a_configuration_is_refused_in_a_sentence(as_on_gpus, family, files, given, engine, reason):
    with pytest.raises(UserError, match=reason):
        configure(family, filled(given, files), **engine)


@pytest.mark.parametrize(
    "given", [LOOKUP, stock("ngram", prompt_lookup_max=3)], ids=["hsd", "ngram"]
)
def test_v1_is_not_what_vllm_falls_back_to(family, monkeypatch, given):
    """Asked for by the user, or by what vLLM's V2 runner does not support."""
    unsupported = "_get_v2_model_runner_unsupported_features"
    configure(family, given)
    asked = getattr(VllmConfig, unsupported).__wrapped__
    with monkeypatch.context() as context:
        wrapped = functools.partial(engine_hooks.unsupported_features_of_v2, lambda self: ["this"])
        context.setattr(VllmConfig, unsupported, lambda self: wrapped(self))
        with pytest.raises(ValueError, match="does not support this: remove"):
            configure(family, given)
        # Other configurations are vLLM's own matter.
        assert asked(configure(family, None)) is not None
    for name, value in ("V2_MODEL_RUNNER", "0"), ("RUST_FRONTEND", "1"):
        with monkeypatch.context() as context:
            context.setenv(f"VLLM_USE_{name}", value)
            with pytest.raises(UserError, match=rf"VLLM_USE_{name}={value}.*: unset it"):
                configure(family, given)


def test_a_target_that_reads_rejected_tokens_is_refused():
    target = SimpleNamespace(model="m", architectures=["LongcatFlashNgramForCausalLM"])
    kinds = "pipeline", "data", "decode_context"
    alone = SimpleNamespace(**{f"{kind}_parallel_size": 1 for kind in kinds})
    (mistake,) = target_mistakes(target, alone)
    assert "rejected tokens" in mistake and "remove speculative_config" in mistake


def test_the_scheduler_reserves_what_workers_have_room_for(family):
    config = configure(family, hsd(sources(NGRAM, {"suffix": {}}, branches=4)), block_size=32)
    config.cache_config.num_gpu_blocks = blocks = 64 * config.scheduler_config.max_num_seqs
    own = config.speculative_config
    assert config.num_lookahead_tokens == own._private_blocks(config).lookahead(4)
    assert own.room_mistake(config, blocks, groups=1) is None
    # Of so many groups of the cache, which vLLM's configuration does not know.
    assert "reserves 80 blocks of the KV cache" in own.room_mistake(config, blocks, groups=20)
    config.model_config.max_model_len = 96
    said = "takes 128 tokens of max_model_len=96 with blocks of 32"
    assert said in own.room_mistake(config, blocks, groups=1)


@pytest.mark.parametrize("levels", [None, object()])
def test_levels_take_no_weights_of_a_draft_model(levels):
    worker = SimpleNamespace(speculative_config=SimpleNamespace(hsd=levels))
    taken: list = []
    expected = pytest.raises(UserError, match="knows one draft model") if levels else nullcontext()
    with expected:
        engine_hooks.set_draft_weight_update_target(taken.append, worker)
    assert taken == ([] if levels else [worker])


# key of vLLM -> (value, where vLLM or the cascade finds it, or what refuses it)
LEVEL_KEYS = {
    "attention_backend": ("TRITON_ATTN", "config.attention_config.backend.name"),
    "code_revision": ("abc", "config.model_config.code_revision"),
    "draft_load_config": ({"load_format": "dummy"}, "load_config.load_format"),
    "draft_tensor_parallel_size": (2, "they must be equal"),
    "enforce_eager": (True, "level.enforce_eager"),
    "kv_cache_dtype": ("fp8", "config.cache_config.cache_dtype"),
    "max_model_len": (99, "config.model_config.max_model_len"),
    "moe_backend": ("triton", "config.kernel_config.moe_backend"),
    "quantization": ("fp8", "config.model_config.quantization"),
    "revision": ("abc", "config.model_config.revision"),
}


def test_every_key_of_vllm_is_tried():
    assert VllmModelKeys.model_fields.keys() - LevelConfig.model_fields.keys() == LEVEL_KEYS.keys()


@pytest.mark.parametrize("key", sorted(LEVEL_KEYS))
def test_a_key_of_vllm_reaches_the_level_or_is_refused(family, monkeypatch, key):
    found: dict = {}
    monkeypatch.setattr(
        program_models, "get_model", lambda vllm_config, prefix, **rest: found.update(rest)
    )
    value, place = LEVEL_KEYS[key]
    given = hsd({"model": family.mid, key: value})
    if " " in place:
        with pytest.raises(UserError, match=place):
            configure(family, given)
        return
    config = configure(family, given)
    config.parallel_config.data_parallel_index = 1
    level = program_models.ProgramModel(SimpleNamespace(vllm_config=config, vocab_size=64), 0)
    level.load(config.speculative_config.level_configs[0])
    assert level.draft_config.parallel_config.data_parallel_index == 1
    places = {"level": level, "config": level.draft_config, **found}
    expected = value["load_format"] if isinstance(value, dict) else value
    root, _, path = place.partition(".")
    assert operator.attrgetter(path)(places[root]) == expected
    eager = graphs.why_eager(CUDAGraphMode.FULL_DECODE_ONLY, [level], 1)
    assert eager == ("levels[0].enforce_eager is set" if key == "enforce_eager" else None)


def test_mtp_layers_alone_are_vllms_own_drafter(family):
    target = cascades.target_of("mtp", family)
    given = hsd({"mtp": {}}, verifier="coupled")
    found = configure(replace(family, target=target), given).speculative_config
    assert (found.method, found.model) == ("mtp", target)
    assert found.draft_sample_method == "probabilistic" and found.hsd_couples_all


def test_a_head_next_to_lookups_is_vllms_own_drafter_too(family, head):
    given = hsd(sources(NGRAM, {"eagle3": head}), adaptive=False)
    found = pickle.loads(pickle.dumps(configure(family, given).speculative_config))
    assert (found.method, found.model) == ("eagle3", head)
    # Keeps the texts on the device.
    assert found.use_ngram() and len(found.hsd_sources.sources) == 2


@pytest.mark.parametrize("nested", [{STATES: [0, 1, 3]}, {STATES: [9], "layer_ids": [0, 1, 3]}])
def test_layers_that_a_head_names_for_vllms_v1_runner_alone(family, head, tmp_path, nested):
    change = change_config(**{STATES: None}, eagle_config=nested)
    own = damaged_copy(head, tmp_path / "head", change)
    alone = stock("eagle3", model=own, draft_sample_method="probabilistic")
    for given in (hsd({"eagle3": own}), hsd(sources(NGRAM, {"eagle3": own})), alone):
        found = pickle.loads(pickle.dumps(configure(family, given).speculative_config))
        models = [each for each in getattr(found, "level_configs", [found]) if each is not None]
        assert [get_eagle3_aux_layers_from_config(each) for each in models] == [(0, 1, 3)]


def test_a_head_next_to_lookups_is_a_level_where_it_adapts(family, head):
    found = configure(family, hsd(sources(NGRAM, {"eagle3": head}))).speculative_config
    lookup, model = found.level_configs
    assert (found.method, found.model) == ("draft_model", head)
    assert lookup is None and model.method == "eagle3"
    assert found.hsd_level_names == ["levels[0]", "levels[0].sources[1]"]
    assert found.use_ngram() and found.use_eagle_block_drop()


def test_a_shorter_context_of_a_level_is_not_the_targets(family, head, tmp_path):
    short = damaged_copy(head, tmp_path / "head", change_config(max_position_embeddings=64))
    for levels in (
        [{"model": family.small, "max_model_len": 64}],
        [{"eagle3": short, "num_tokens": 2}, {"model": family.mid}],
        [sources(NGRAM, {"eagle3": short})],
    ):
        config = configure(family, hsd(*levels), max_model_len=256)
        assert config.model_config.max_model_len == 256


def test_blocks_of_branches_take_no_tokens_of_a_step(family):
    given = hsd(sources(NGRAM, {"suffix": {}}, branches=4), num_speculative_tokens=8)
    configure(family, given, max_num_batched_tokens=64)


def test_lookups_are_not_left_out_where_vllm_makes_another_drafter():
    speculative = SimpleNamespace(hsd_sources=object())
    runner = SimpleNamespace(speculative_config=speculative, speculator=SimpleNamespace())
    with pytest.raises(UserError, match="vLLM's SimpleNamespace cannot draft next"):
        load_model(lambda runner: None, runner)


@pytest.mark.parametrize("limit", [None, 8])
def test_a_head_alone_is_vllms_own_drafter(family, head, limit):
    given = hsd({"eagle3": head, "kv_cache_dtype": "bfloat16"}, disable_by_batch_size=limit)
    found = configure(family, given, max_num_seqs=16).speculative_config
    assert (found.method, found.model) == ("eagle3", head)
    assert found.draft_sample_method == "probabilistic" and found.kv_cache_dtype == "bfloat16"
    assert found.rejection_sample_method == "block" and found.num_speculative_tokens == 3
    by_size = None if limit is None else [(1, 8, 3), (9, 9, 0)]
    assert found.num_speculative_tokens_per_batch_size == by_size


@pytest.mark.parametrize(
    "given",
    [LOOKUP, hsd(EAGLE3), hsd(PAIR), stock("eagle3", model="HEAD")],
    ids=["lookup", "head", "head next to a lookup", "stock drafter"],
)
def test_adaptive_verification_is_vllms(family, files, monkeypatch, given):
    """Where it cannot verify so, as on a CPU, vLLM says why."""
    given = filled(given, files)
    adapts = {**given, "enable_adaptive_verification": True}
    with pytest.raises(ValueError, match="Adaptive verification requires full CUDA graphs"):
        configure(family, adapts)
    monkeypatch.setattr(VllmConfig, "_validate_adaptive_verification", lambda self: None)
    assert configure(family, adapts).speculative_config.enable_adaptive_verification
    assert not configure(family, given).speculative_config.enable_adaptive_verification


SOURCES = sources(NGRAM, {"ngram": {"max": 1}}, branches=4)
BRANCHES = {"levels": [SOURCES], "adaptive": False}


@pytest.mark.parametrize(
    ("keys", "max_num_seqs", "drafts"),
    [
        ({}, 65, {1: 3, 64: 3, 65: 0}),
        ({}, 64, None),
        ({"disable_by_batch_size": 8}, 16, {1: 3, 8: 3, 9: 0, 16: 0}),
        ({"disable_by_batch_size": 16}, 16, None),
        # vLLM captures all lengths for it; the scheduler chooses among them.
        ({"adaptive": True, "disable_by_batch_size": 16}, 16, {1: 3, 14: 3, 15: 1, 16: 0}),
        ({"adaptive": True}, 2, {1: 3, 2: 0}),
        # No second length fits; the scheduler still chooses, and not drafting has no whole graph.
        ({"adaptive": True}, 1, {1: 3}),
        # Four rows of four tokens: 16 requests with branches; more of them draft a chain each.
        (BRANCHES, 80, {1: 15, 16: 15, 17: 3, 64: 3, 65: 0}),
        (BRANCHES, 16, None),
        (BRANCHES, 17, {16: 15, 17: 3}),
        ({**BRANCHES, "adaptive": True}, 80, {15: 15, 16: 7, 17: 0}),
        ({**BRANCHES, "disable_by_batch_size": 64}, 80, {64: 15, 65: 0}),
    ],
)
def test_large_batches_draft_nothing(family, as_on_gpus, keys, max_num_seqs, drafts):
    """By vLLM's own schedule of draft lengths, only where a batch can be as large."""
    config = configure(family, {**LOOKUP, **keys}, max_num_seqs=max_num_seqs)
    given = config.speculative_config.num_speculative_tokens_per_batch_size
    assert (given is None) == (drafts is None)
    if drafts is not None:
        longest = config.speculative_config.num_speculative_tokens
        by_size = build_dynamic_sd_schedule_lookup(given, max_num_seqs, longest)
        assert {size: by_size[size] for size in drafts} == drafts


@pytest.mark.parametrize("key", ["long_prefill_token_threshold", "max_num_scheduled_tokens"])
def test_vllm_pads_no_prefix_hit_beyond_a_step(family, as_on_gpus, key):
    """It waits for ever, or ends: four rows of four tokens."""
    for most, pads in ((15, False), (16, True)):
        config = configure(family, {**LOOKUP, **BRANCHES}, max_num_seqs=16, **{key: most})
        table = config.speculative_config.num_speculative_tokens_per_batch_size
        assert (table is None) == pads
