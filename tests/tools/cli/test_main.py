"""The command line: doctor's findings and exit status, errors of the user's making."""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from unittest import mock

import pytest
from support.command_line import refused, run
from support.engines import in_process

from vllm_hsd.errors import UserError
from vllm_hsd.host.hooks import HOOKS, REGISTRY
from vllm_hsd.tools.cli import doctor
from vllm_hsd.tools.cli import main as cli


def doctor_here(runs: dict[str, tuple[tuple[str, ...], dict[str, str]]]) -> dict:
    """Name -> (exit status, printed lines) of `vllm-hsd doctor` with arguments and environment."""
    found = {}
    for name, (arguments, environment) in runs.items():
        with (
            mock.patch.dict(os.environ, environment),
            contextlib.redirect_stdout(io.StringIO()) as printed,
        ):
            status = cli.main(["doctor", *arguments])
        found[name] = status, printed.getvalue().splitlines()
        # Once in a process is enough.
        doctor._bfloat16_status = lambda: 0
    return found


def test_a_library_that_is_missing_is_named():
    program = "import sys; sys.modules['scipy'] = None; from vllm_hsd.tools import command; "
    done = subprocess.run(
        [sys.executable, "-c", program + "sys.exit(command.main())"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("vllm-hsd: scipy") and "[tools]" in done.stderr


@pytest.fixture(scope="module")
def doctor_runs(family) -> dict[str, tuple[int, list[str]]]:
    """In a process of their own: in this one, tests have replaced functions of vLLM."""
    cascade = {"method": "hsd", "num_speculative_tokens": 4, "levels": [{"model": family.mid}]}
    configuration = (
        "--verbose", "--model", family.target, "--speculative-config", json.dumps(cascade),
        "--", "--skip-tokenizer-init", "--max-model-len", "64",
    )  # fmt: skip
    runs = {
        "here": ((), {}),
        "left out": ((), {"VLLM_PLUGINS": "other"}),
        "on V1": ((), {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
        "configuration": (configuration, {}),
    }
    return in_process(doctor_here, {"runs": runs})


def test_doctor_passes_here_with_one_line_about_names_of_vllm(doctor_runs):
    status, lines = doctor_runs["here"]
    assert status == 0, lines
    for name in ("Python", "torch", "transformers", "vllm", "device:", "Triton backend"):
        assert any(line.startswith("ok") and name in line for line in lines), name
    assert any(re.search(r"^ok +\d+ names of vLLM as tested with 0\.3[23]", line) for line in lines)
    assert lines[-1] == "Method 'hsd' can run here (0 problems)."


def test_doctor_lists_every_name_and_checks_a_configuration(doctor_runs, family):
    status, lines = doctor_runs["configuration"]
    assert status == 0, lines
    (valid,) = [line for line in lines if "configuration is valid" in line]
    assert f"method='hsd', levels=['{family.mid}'], num_spec_tokens=4" in valid
    REGISTRY.load()
    for hook in HOOKS.values():
        (line,) = [line for line in lines if f"vLLM name {hook.name}:" in line]
        assert line.startswith("ok") and hook.why in line


@pytest.mark.parametrize(
    ("status", "flags", "words"),
    [
        (0, {"avx2", "avx512_bf16"}, "run on this CPU"),
        (0, {"avx2"}, "emulates bfloat16"),
        (0, set(), "run on this CPU"),
        (-4, {"avx2"}, "illegal instruction"),
        (0, {"amx_bf16", "hypervisor"}, "claims AMX"),
        (3, set(), "status 3"),
    ],
)
def test_doctor_says_what_bfloat16_is_worth(status, flags, words):
    assert words in doctor.bfloat16_finding(status, flags).text


@pytest.mark.parametrize("given", ["{", "[" * 5000, "[]", "null"])
def test_doctor_wants_a_json_object(given):
    with pytest.raises(UserError, match=r"^--speculative-config is not .*JSON.*\.$"):
        doctor.configuration_findings("T", given, ())


def test_doctor_checks_a_configuration_only_for_a_target(capsys):
    assert "add --model" in refused(capsys, "doctor", "--speculative-config", "{}")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("left out", "VLLM_PLUGINS is 'other' and leaves the plugin out"),
        ("on V1", "VLLM_USE_V2_MODEL_RUNNER=0.*unset it"),
    ],
)
def test_doctor_fails_where_the_environment_keeps_vllm_from_the_plugin(doctor_runs, name, said):
    status, lines = doctor_runs[name]
    [problem] = [line for line in lines if line.startswith("problem")]
    assert status == 1 and re.search(said, problem)


def parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """A parser and all parsers of its commands."""
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [below for choice in action.choices.values() for below in parsers(choice)]
    return found


def test_every_option_has_a_line_of_help_and_shows_its_default():
    for parser in parsers(cli.make_parser()):
        text = " ".join(parser.format_help().split())
        options = [a for a in parser._actions if not isinstance(a, argparse._SubParsersAction)]
        for action in options:
            assert action.help, f"{parser.prog} {action.option_strings or action.dest}"
            shown = action.option_strings and action.default not in (None, "==SUPPRESS==", [], {})
            if shown and action.default is not False:
                assert f"default: {action.default}" in text, f"{parser.prog} {action.dest}"
        is_group = len(options) < len(parser._actions)
        assert is_group or re.search(rf"^examples?:\n  {parser.prog} ", parser.format_help(), re.M)


@pytest.mark.parametrize(
    ("outcome", "status", "said"),
    [
        ([0], 0, ""),
        (UserError("--x is 0: raise it."), 2, "vllm-hsd build store: --x is 0: raise it.\n"),
        (KeyboardInterrupt(), 130, "vllm-hsd build store: interrupted\n"),
    ],
    ids=["done", "refused", "interrupted"],
)
def test_exit_status(monkeypatch, capsys, outcome, status, said):
    monkeypatch.setattr("vllm_hsd.tools.cli.build.build_store", mock.Mock(side_effect=outcome))
    assert run("build", "store", "--target", "T", "--output", "O", "text") == status
    assert capsys.readouterr().err == said


def test_an_error_of_the_package_is_no_verdict(monkeypatch, capsys):
    monkeypatch.setattr("vllm_hsd.tools.cli.build.build_store", mock.Mock(side_effect=KeyError(7)))
    assert run("build", "store", "--target", "T", "--output", "O", "text") == 4
    assert capsys.readouterr().err.startswith("Traceback")
