"""What is adaptive although the configuration says nothing about it."""

from types import SimpleNamespace

import pytest
from vllm.config import CUDAGraphMode

from vllm_hsd.config import defaults
from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.config.level_checks import check_serving
from vllm_hsd.errors import UserError
from vllm_hsd.host.spec_config import CascadeSpeculativeConfig

NGRAM, MODEL = {"ngram": {"max": 3}}, {"model": "some/model"}
HEAD_ALONE = {"eagle3": "some/head"}
HEAD = {**HEAD_ALONE, "num_tokens": 2}
LOOKUPS = {"sources": [NGRAM, {"suffix": {}}]}
TARGET = SimpleNamespace(is_encoder_decoder=False)


def with_defaults(*levels: dict, connector=None, **keys):
    arguments = SimpleNamespace(kv_transfer_config=connector, kv_offloading_size=None)
    given = {"num_speculative_tokens": 5, "levels": list(levels), **keys}
    return defaults.with_defaults(CascadeConfig.parse(given), arguments)


def adapts(*levels: dict, **keys) -> bool:
    return bool(with_defaults(*levels, **keys).adaptive)


@pytest.mark.parametrize("level", [NGRAM, MODEL, {"early_exit": 2}, LOOKUPS])
def test_drafts_adapt_where_the_host_reads_them(level):
    assert adapts(level) and adapts({**NGRAM, "num_tokens": 2}, MODEL) and adapts(HEAD, MODEL)
    assert not adapts(level, adaptive=False)


def test_not_where_it_does_not_fit():
    horizontal = {**NGRAM, "num_tokens": 2}, MODEL
    assert not adapts(*horizontal, horizontal_tokens=2)
    assert adapts(*horizontal, horizontal_tokens=2, adaptive=True)
    assert not adapts(MODEL, connector=object()) and adapts(NGRAM, connector=object())
    assert not adapts({**MODEL, "branches": 2})
    assert not adapts({**NGRAM, "num_tokens": 2}, {**MODEL, "verifier": "none"})
    colder = {**MODEL, "temperature_scale": 0.5}
    assert not adapts({**MODEL, "num_tokens": 2}, colder)
    assert adapts({**NGRAM, "num_tokens": 2}, colder)
    assert not adapts(HEAD_ALONE) and not adapts({"sources": [NGRAM, {"mtp": {}}]})
    assert adapts({"sources": [NGRAM, HEAD_ALONE]})


def levels_of(*levels: dict, **keys) -> tuple[list, list]:
    """Kinds and draft lengths of what is served."""
    found = defaults.with_models_as_levels(with_defaults(*levels, **keys))
    return [level.kind for level in found.levels], found.draft_lengths


def test_a_model_next_to_lookups_is_a_level_where_drafts_adapt():
    of_head, both = {"sources": [NGRAM, HEAD_ALONE]}, {"sources": [NGRAM, MODEL]}
    assert levels_of(of_head) == (["sources", "eagle3"], [5, 5])
    assert levels_of(both | {"num_tokens": 2}, MODEL) == (["sources", "model", "model"], [2, 2, 5])
    three = {"sources": [*LOOKUPS["sources"], MODEL]}
    assert levels_of(three) == (["sources", "model"], [5, 5])
    assert levels_of(both, adaptive=False) == (["sources"], [5])
    assert levels_of(LOOKUPS) == (["sources"], [5]) and levels_of(MODEL) == (["model"], [5])
    assert levels_of({"sources": [NGRAM, {"mtp": {}}]}) == (["sources"], [5])


def test_a_head_verifies_no_level_below_it():
    lowest = {"sources": [NGRAM, HEAD_ALONE], "num_tokens": 2}
    found = defaults.with_models_as_levels(with_defaults(lowest, MODEL))
    assert found.verifying == [False, False, True]


def test_levels_that_adapt_draw_at_one_temperature():
    """A level that is left out passes on what another one has drawn."""
    engine, low = SimpleNamespace(distributed_executor_backend=None), {**MODEL, "num_tokens": 2}
    check_serving(with_defaults(low, MODEL, adaptive=True), engine)
    colder = with_defaults(low, {**MODEL, "temperature_scale": 0.5}, adaptive=True)
    with pytest.raises(UserError, match="same temperature_scale at all levels"):
        check_serving(colder, engine)


def test_branches_that_engines_cannot_host_are_refused():
    def mistakes(**given) -> list[str]:
        own = {**parts, **given}
        return list(CascadeSpeculativeConfig.branch_mistakes(asked, SimpleNamespace(**own)))

    asked = SimpleNamespace(
        hsd=SimpleNamespace(branches=4), num_speculative_tokens=23, max_num_new_slots_for_drafting=0
    )
    one = {f"{kind}_parallel_size": 1 for kind in ("pipeline", "decode_context", "prefill_context")}
    parts = {
        "parallel_config": SimpleNamespace(**one),
        "cache_config": SimpleNamespace(kv_sharing_fast_prefill=False),
        "model_config": TARGET,
        "aux_output_config": SimpleNamespace(enabled=False),
        "compilation_config": SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE),
        "scheduler_config": SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=24),
    }
    assert not mistakes()
    for part, key, said in (
        ("model_config", "is_encoder_decoder", "does not run with an encoder: remove branches."),
        ("aux_output_config", "enabled", "does not run with enable_return_routed_experts: remove"),
        ("cache_config", "kv_sharing_fast_prefill", "does not run with kv_sharing_fast_prefill"),
    ):
        (mistake,) = mistakes(**{part: SimpleNamespace(**{key: True})})
        assert said in mistake
    (mistake,) = mistakes(
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=23)
    )
    assert "make 24 tokens of a request, above max_num_batched_tokens=23" in mistake
    (mistake,) = mistakes(
        scheduler_config=SimpleNamespace(max_num_seqs=3, max_num_batched_tokens=24)
    )
    assert "takes 4 rows of attention for a request, and there are max_num_seqs=3" in mistake


def test_nothing_where_the_host_reads_no_draft(as_on_gpus):
    assert not adapts(NGRAM) and not adapts(MODEL)
    assert levels_of({"sources": [NGRAM, MODEL]}, adaptive=True) == (["sources"], [5])
