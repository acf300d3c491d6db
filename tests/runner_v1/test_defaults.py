"""What is adaptive and what has branches although the configuration says nothing about it."""

from types import SimpleNamespace

import pytest
from vllm.platforms import current_platform

from vllm_hsd.config import CascadeConfig
from vllm_hsd.runner_v1.spec_config import V1CascadeConfig
from vllm_hsd.runner_v2.spec_config import V2CascadeConfig

NGRAM, MODEL = {"ngram": {"max": 3}}, {"model": "some/model"}
HEAD = {"eagle3": "some/head", "num_tokens": 2}
SOURCES = {"sources": [NGRAM, {"eagle3": "some/head"}]}
TARGET = SimpleNamespace(uses_mrope=False)


def with_defaults(*levels: dict, runner=V1CascadeConfig, target=TARGET, connector=None, **keys):
    arguments = SimpleNamespace(
        enable_lora=False,
        kv_transfer_config=connector,
        kv_offloading_size=None,
        enable_dbo=keys.pop("enable_dbo", False),
        max_num_batched_tokens=keys.pop("max_num_batched_tokens", None),
    )
    given = {"num_speculative_tokens": 5, "levels": list(levels), **keys}
    return runner.with_defaults(CascadeConfig.parse(given), target, arguments)


def adapts(*levels: dict, **keys) -> bool:
    return bool(with_defaults(*levels, **keys).adaptive)


@pytest.mark.parametrize("level", [NGRAM, MODEL, {"early_exit": 2}, {"eagle3": "some/head"}])
def test_on_the_v1_runner(level):
    assert adapts(level) and adapts({**NGRAM, "num_tokens": 2}, MODEL) and adapts(HEAD, MODEL)
    assert not adapts(level, adaptive=False)


def test_not_where_it_does_not_fit():
    assert not adapts({**NGRAM, "num_tokens": 2}, MODEL, horizontal_tokens=2)
    assert not adapts(MODEL, connector=object()) and adapts(NGRAM, connector=object())
    assert not adapts(MODEL, runner=V2CascadeConfig)
    assert adapts({**NGRAM, "num_tokens": 2}, MODEL, horizontal_tokens=2, adaptive=True)


def test_branches_of_sources_alone():
    assert with_defaults(SOURCES).branches == 4
    assert with_defaults(SOURCES, adaptive=False).branches == 4
    assert with_defaults({**SOURCES, "branches": 2}).branches == 2
    assert with_defaults({**SOURCES, "branches": 1}).branches == 1
    assert with_defaults({**SOURCES, "num_tokens": 2}, MODEL).branches == 1
    assert with_defaults(MODEL).branches == 1


def test_no_branches_where_they_do_not_fit(monkeypatch):
    lookups = {"sources": [NGRAM, {"suffix": {}}]}
    assert with_defaults(lookups, connector=object()).branches == 1
    assert with_defaults(lookups, target=SimpleNamespace(uses_mrope=True)).branches == 1
    assert with_defaults(lookups, enable_dbo=True).branches == 1
    assert with_defaults(lookups, runner=V2CascadeConfig).branches == 1
    # Three drafts of five tokens with their root, and the slot of a draft.
    assert with_defaults(lookups, max_num_batched_tokens=19).branches == 3
    assert with_defaults(lookups, max_num_batched_tokens=12).branches == 1
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert with_defaults(lookups).branches == 1
