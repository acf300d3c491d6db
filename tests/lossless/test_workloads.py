"""The workloads of `vllm-hsd verify` on tiny models."""

import json

import pytest
from support.engines import ENGINE_DEFAULTS

from vllm_hsd.cli.verify import WORKLOADS
from vllm_hsd.cli.verify_workloads import NAMES, shares

ENGINE_ARGS = json.dumps(
    {key: ENGINE_DEFAULTS[key] for key in ("enforce_eager", "kv_cache_memory_bytes")}
    | {"max_model_len": 512}
)


def config(family) -> dict:
    """The default: it adapts."""
    return {"method": "hsd", "num_speculative_tokens": 4, "levels": [{"model": family.mid}]}


def options(*workloads: str, tokens: int = 2048) -> tuple[str, ...]:
    found = ("--workload", ",".join(workloads), "--temperatures", "0,1", "--tokens", str(tokens))
    return (*found, "--engine-args", ENGINE_ARGS)


def test_all_workloads_are_the_default_within_the_same_tokens():
    assert WORKLOADS == NAMES
    steady, other = shares(NAMES, 16384, 2)
    assert 2 * steady + other * (len(NAMES) - 1) <= 2 * 16384


# The other ones are in the fast form of the self-test.
FAST = ("crowd64", "chunks")


@pytest.mark.parametrize(
    "names", [FAST, pytest.param(NAMES[1:], marks=pytest.mark.slow)], ids=["fast", "all"]
)
def test_a_sound_configuration_passes_its_workloads(text_family, verify, names):
    status, found = verify(text_family.target, config(text_family), *options(*names, tokens=1024))
    assert found["lossless"] and status == 0, found["verdict"]
    served = {each["name"]: each for each in found["workloads"]}
    assert set(served) == set(names)
