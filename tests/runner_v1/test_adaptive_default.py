"""Where draft lengths adapt although the configuration says nothing about it."""

from types import SimpleNamespace

import pytest

from vllm_hsd.config import CascadeConfig
from vllm_hsd.runner_v1.spec_config import V1CascadeConfig
from vllm_hsd.runner_v2.spec_config import V2CascadeConfig

NGRAM, MODEL = {"ngram": {"max": 3}}, {"model": "some/model"}
HEAD = {"eagle3": "some/head", "num_tokens": 2}


def adapts(*levels: dict, runner=V1CascadeConfig, connector=None, **keys) -> bool:
    arguments = SimpleNamespace(
        enable_lora=False, kv_transfer_config=connector, kv_offloading_size=None
    )
    given = {"num_speculative_tokens": 5, "levels": list(levels), **keys}
    return bool(runner.with_defaults(CascadeConfig.parse(given), arguments).adaptive)


@pytest.mark.parametrize("level", [NGRAM, MODEL, {"early_exit": 2}, {"eagle3": "some/head"}])
def test_on_the_v1_runner(level):
    assert adapts(level) and adapts({**NGRAM, "num_tokens": 2}, MODEL)
    assert not adapts(level, adaptive=False)


def test_not_where_it_does_not_fit():
    assert not adapts(HEAD, MODEL)
    assert not adapts({**NGRAM, "num_tokens": 2}, MODEL, horizontal_tokens=2)
    assert not adapts(MODEL, connector=object()) and adapts(NGRAM, connector=object())
    assert not adapts(MODEL, runner=V2CascadeConfig)
    assert adapts({**NGRAM, "num_tokens": 2}, MODEL, horizontal_tokens=2, adaptive=True)
