"""Bad input on the command line: one sentence, exit status 2, no traceback; interruptions."""

import json
import re

import pytest
from support.command_line import run
from support.plain_profile import plain_profile

from vllm_hsd.tools.planner import measure
from vllm_hsd.tools.planner.profile import Profile
from vllm_hsd.tools.planner.task import Task, candidates


@pytest.fixture
def profile():
    return Profile(**plain_profile())


def fails(capsys, *arguments):
    """What `vllm-hsd ARGUMENTS` says on its way out with status 2."""
    assert run(*arguments) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"vllm-hsd {arguments[0]}: ") and said.endswith(".")
    return said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-levels", 0], "allow at least 1 level"),
        (["--max-draft-tokens", 0], "covers 1 to 4 tokens"),
        (["--max-draft-tokens", 5], "covers 1 to 4 tokens"),
        (["--batch-sizes", 3], "batch size 3 was not measured"),
        (["--batch-sizes", 0], "--batch-sizes has 0"),
        (["-o", "nowhere/cascade.json"], "no directory 'nowhere'"),
        (["-o", "./profile.json"], "would write over the profile"),
    ],
)
def test_impossible_constraints(profile, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    profile.save("profile.json")
    assert message in fails(capsys, "plan", "profile.json", *arguments)


def test_a_profile_of_another_machine_is_planned_with_a_warning(profile, tmp_path, capsys):
    profile.versions, profile.machine = {"vllm": "0.1.0"}, {"processor": "Abacus 9"}
    path = tmp_path / "profile.json"
    profile.save(path)
    assert run("plan", path, "-o", tmp_path / "cascade.json") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "vLLM 0.1.0 and this is vLLM" in said
    assert "processor Abacus 9 and this machine has" in said
    assert re.search(r"planned in \d+\.\d\d s \(graph .*, search .*, predictions .*\)", said)
    assert json.loads((tmp_path / "cascade.json").read_text())["schema"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "T", "--models", "T"], "the target 'T' is among its own candidates"),
        (["--target", "T"], "give at least one candidate"),
        (["--target", "T", "--models", "A", "--temperature", -1], "--temperature is -1"),
        (["--target", "T", "--models", "A", "--top-p", 1.5], "--top-p is 1.5"),
        (["--target", "T", "--models", "A", "--ngram", 0], "--ngram is 0"),
        (["--target", "T", "--exit-heads", "D"], "D"),
        (["--target", "T", "--models", "A", "--max-draft-tokens", 0], "give 1 to 63"),
        (["--target", "T", "--models", "A", "--max-draft-tokens", 64], "give 1 to 63"),
        (["--target", "T", "--models", "A", "--batch-sizes", 0], "--batch-sizes must be at least"),
        (["--target", "T", "--models", "A", "--num-prompts", 0], "--num-prompts is 0"),
        (["--target", "T", "--models", ""], "--models has an empty name"),
        (["--target", "T", "--exits", "2,0"], "--exits has 0"),
        (["--target", "T", "--models", "A", "--seed", -1], "--seed is -1"),
        (["--target", "T", "--models", "A", "--device", "abacus"], "--device 'abacus'"),
        (["--target", "T", "--models", "A", "--engine-args", "{"], "--engine-args is not JSON"),
        (
            ["--target", "T", "--models", "A", "--engine-args", '{"speculative_config": {}}'],
            "must not hold speculative_config",
        ),
        (["--target", "T", "--models", "A", "-o", "x/p.json"], "no directory 'x'"),
        (["--target", "T", "--models", "A", "-o", "p.safetensors"], "names the JSON file"),
        (
            ["--target", "T", "--suffix", "s.safetensors", "-o", "s.json"],
            "write over 's.safe",
        ),
        (["--target", "T", "--models", *"ABCDEFGHIJKLMN"], "14 models, exits and heads are too"),
        (["--target", "T", "--models", "A", "--prompts", "none.jsonl"], "no prompts file"),
        (["--target", "T", "--models", "A", "--prompts", "empty.txt"], "holds no prompt"),
        (["--target", "T", "--models", "A", "--prompts", "lines.jsonl"], "line 1 of"),
    ],
)
def test_profiles_that_cannot_be_measured(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "lines.jsonl").write_text('{"prompt": ""}\n')
    assert message in fails(capsys, "profile", *arguments)
    assert not list(tmp_path.glob("*.partial"))


def test_a_profile_on_a_gpu_is_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure.torch.cuda, "is_available", lambda: True)
    arguments = ["--target", "T", "--models", "A", "-o", tmp_path / "p.json"]
    assert "works on CPUs alone" in fails(capsys, "profile", *arguments)


def test_another_machine_or_file_is_another_measurement(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    task = Task(str(model), candidates(ngram=2))
    first = task.fingerprint([[1]], {}, {"cores": 1})
    assert task.fingerprint([[1]], {}, {"cores": 1}) == first
    assert task.fingerprint([[1]], {}, {"cores": 2}) != first
    (model / "config.json").write_text("{ }")
    assert task.fingerprint([[1]], {}, {"cores": 1}) != first


def test_an_interrupted_profile_says_how_to_resume(tmp_path, capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measure_profile", interrupted)
    arguments = ["--target", "T", "--models", "A", "-o", tmp_path / "p.json"]
    assert run("profile", *arguments) == 130
    assert "Rerun the same command to resume" in capsys.readouterr().err
