"""The workloads of `vllm-hsd verify` on tiny models."""

import json

import pytest
from support.adapters import write_adapter
from support.engines import ENGINE_DEFAULTS

from vllm_hsd.tools.cli.verify import WORKLOADS
from vllm_hsd.tools.cli.verify_workloads import NAMES, shares

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


@pytest.fixture(scope="session")
def adapters(text_family, tmp_path_factory) -> tuple[str, str]:
    directory = tmp_path_factory.mktemp("adapters")
    paths = [write_adapter(directory / str(i), text_family.target, seed=i) for i in (1, 2)]
    return "--adapters", ",".join(paths)


@pytest.mark.slow
def test_the_adapter_of_a_neighbour_is_found(text_family, adapters, verify):
    arguments = *options("adapters"), *adapters
    patch = "support.adapters:install_neighbours"
    status, found = verify(text_family.target, config(text_family), *arguments, patch=patch)
    assert status == 1 and not found["lossless"], found["verdict"]


def test_a_directory_without_an_adapter_is_refused(text_family, verify, tmp_path, capsys):
    arguments = *options("adapters"), "--adapters", str(tmp_path)
    with pytest.raises(FileNotFoundError):  # of verify.json
        verify(text_family.target, config(text_family), *arguments)
    assert "is no LoRA adapter" in capsys.readouterr().err


# The other ones are in the fast form of the self-test.
FAST = ("crowd64", "chunks")


@pytest.mark.parametrize(
    "names", [FAST, pytest.param(NAMES[1:], marks=pytest.mark.slow)], ids=["fast", "all"]
)
def test_a_sound_configuration_passes_its_workloads(text_family, adapters, verify, names):
    given = (*options(*names, tokens=1024), *(adapters if "adapters" in names else ()))
    status, found = verify(text_family.target, config(text_family), *given)
    assert found["lossless"] and status == 0, found["verdict"]
    served = {each["name"]: each for each in found["workloads"]}
    assert set(served) == set(names)
