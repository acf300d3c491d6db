"""The workloads of `vllm-hsd verify` on tiny models."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from unittest import mock

import pytest
from support.adapters import write_adapter
from support.marks import slow

from vllm_hsd.errors import UserError
from vllm_hsd.tools.audit import workloads
from vllm_hsd.tools.audit.sampled import Setting
from vllm_hsd.tools.audit.workloads import Facts
from vllm_hsd.tools.cli import verify_runs
from vllm_hsd.tools.cli.verify import WORKLOADS
from vllm_hsd.tools.cli.verify_workloads import NAMES, shares


@pytest.fixture
def under(text_family, verify) -> Callable[..., tuple[int, dict]]:
    """`verify` of the default, which adapts, under workloads."""
    config = {"method": "hsd", "num_speculative_tokens": 4, "levels": [{"model": text_family.mid}]}

    def run(workloads: Sequence[str], *options: str, **keys) -> tuple[int, dict]:
        given = "--workload", ",".join(workloads), *options
        return verify(text_family.target, config, *given, temperatures="0,1", **keys)

    return run


def test_all_workloads_are_the_default_within_the_same_tokens():
    assert WORKLOADS == NAMES
    steady, other = shares(NAMES, 16384, 2)
    assert 2 * steady + other * (len(NAMES) - 1) <= 2 * 16384
    assert shares(["adapters"], 256, 1) == (0, 256)


@pytest.fixture(scope="session")
def adapters(text_family, tmp_path_factory) -> tuple[str, str]:
    directory = tmp_path_factory.mktemp("adapters")
    paths = [write_adapter(directory / str(i), text_family.target, seed=i) for i in (1, 2)]
    return "--adapters", ",".join(paths)


@pytest.mark.slow
def test_the_adapter_of_a_neighbour_is_found(adapters, under):
    status, found = under(["adapters"], *adapters, patch="support.adapters:install_neighbours")
    assert status == 1 and not found["lossless"], found["verdict"]


def test_a_directory_without_an_adapter_is_refused(under, tmp_path, capsys):
    assert under(["adapters"], "--adapters", str(tmp_path)) == (2, {})
    assert "is no LoRA adapter" in capsys.readouterr().err


@pytest.mark.parametrize("number", [6, 8, 9])
@pytest.mark.parametrize("settings", [[], [Setting(0.7), Setting(1.0)]])
def test_every_prompt_meets_every_kind_of_request(monkeypatch, number, settings):
    asked = set()

    def generate(engine, texts, *_, **__):
        kinds = [(each["temperature"], each["seed"] is None) for each in texts.params]
        asked.update(zip((prompt[0] for prompt in texts.prompts), kinds, strict=True))
        raise KeyboardInterrupt

    monkeypatch.setattr(workloads.sampled, "generate", generate)
    engine, prompts = SimpleNamespace(call=lambda *_: {}), [[i] * 40 for i in range(number)]
    given = engine, Facts(), prompts, settings, 1 << 16, (True, True), True
    with pytest.raises(KeyboardInterrupt):
        workloads.run("chunks", *given, lambda *_: None)
    kinds = {(0.0, True)} | {
        (own.temperature, drawn) for own in settings for drawn in (True, False)
    }
    assert asked == {(i, kind) for i in range(number) for kind in kinds}


def test_an_older_verdict_does_not_stay_where_a_run_ends_in_an_error(
    verify, text_family, tmp_path, monkeypatch
):
    ended = mock.Mock(side_effect=UserError("the engine ended"))
    monkeypatch.setattr(verify_runs.bench, "inspect", ended)
    (tmp_path / "verify.json").write_text('{"lossless": true}')
    config = {"method": "ngram", "num_speculative_tokens": 2}
    assert verify(text_family.target, config) == (2, {})


# The other ones are in the fast form of the self-test.
@pytest.mark.parametrize("names", [("crowd64", "chunks"), *slow(NAMES[1:])], ids=["fast", "all"])
def test_a_sound_configuration_passes_its_workloads(adapters, under, names):
    status, found = under(names, *(adapters if "adapters" in names else ()), tokens=1024)
    assert found["lossless"] and status == 0, found["verdict"]
    assert {each["name"] for each in found["workloads"]} == set(names)
