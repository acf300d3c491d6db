"""The command line: doctor's findings and exit status, errors of the user's making."""

import os
import signal
import subprocess
import sys

import pytest

from vllm_hsd import compat
from vllm_hsd.cli import doctor
from vllm_hsd.cli import main as cli


def run_doctor(**environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "vllm_hsd.cli.main", "doctor"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_doctor_passes_here_and_names_every_hook():
    result = run_doctor()
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    for name in ("Python", "torch", "transformers", "vllm", "device:", "runner:"):
        assert any(line.startswith("ok") and name in line for line in lines), name
    for hook in compat.HOOKS:
        line = next(line for line in lines if f"hook {hook.name}:" in line)
        expected = "in place" if hook.place == "class" else "as tested"
        assert line.startswith("ok") and expected in line
    assert lines[-1] == "Method 'hsd' can run here (0 problems)."


def test_doctor_fails_where_vllm_would_not_load_the_plugin_or_would_use_another_runner():
    result = run_doctor(VLLM_PLUGINS="other", VLLM_USE_V2_MODEL_RUNNER="1")
    assert result.returncode == 1
    problems = [line for line in result.stdout.splitlines() if line.startswith("problem")]
    assert len(problems) == 2
    assert "VLLM_PLUGINS" in problems[0]
    assert "VLLM_USE_V2_MODEL_RUNNER" in problems[1]


def test_doctor_names_a_hook_that_differs_or_is_missing():
    differs = compat.Hook("vllm_hsd.cli.doctor.hook_finding", "is a test", ("other",))
    finding = doctor.hook_finding(differs)
    assert finding.status == "problem" and "takes (hook), not (other)" in finding.text
    missing = compat.Hook("vllm_hsd.cli.doctor.nowhere", "is a test", ())
    finding = doctor.hook_finding(missing)
    assert finding.status == "problem" and "is not there" in finding.text


def test_doctor_names_a_hook_that_somebody_else_replaced():
    hook = compat.Hook("textwrap.shorten", "is a test", ("text", "width", "kwargs"))
    finding = doctor.hook_finding(hook)
    assert finding.status == "problem" and "another plugin" in finding.text


def test_doctor_stops_at_a_module_that_does_not_import(tmp_path, monkeypatch):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise RuntimeError('nms\\nmore')")
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator is missing')")
    result = run_doctor(PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert "torchvision" in result.stdout and "pip uninstall torchvision" in result.stdout
    assert "transformers does not import: RuntimeError: nms\n" in result.stdout
    assert "hook" not in result.stdout


@pytest.mark.parametrize(
    ("status", "flags", "kind", "words"),
    [
        (0, {"avx512f"}, "ok", "run on this CPU"),
        (-signal.SIGILL, set(), "note", "illegal instruction on this CPU"),
        (0, {"amx_bf16", "hypervisor"}, "note", "claims AMX"),
        (1, set(), "note", "ended with status 1"),
    ],
)
def test_doctor_on_bfloat16(status, flags, kind, words):
    finding = doctor.bfloat16_finding(status, flags)
    assert finding.status == kind and words in finding.text


def test_an_error_of_the_user_is_one_line_and_status_2(capsys, tmp_path):
    assert cli.main(["plan", str(tmp_path / "missing.json")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("vllm-hsd plan: ") and message.count("\n") == 1


def test_no_command_and_unknown_commands_are_refused(capsys):
    for arguments in ([], ["nonsense"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2
    assert "doctor" in capsys.readouterr().err
