"""Bad input on the command line: one sentence, exit status 2, no traceback; interruptions."""

import json
import re
from pathlib import Path
from unittest import mock

import pytest
from support.command_line import refused, run
from support.plain_profile import plain_profile, with_tables

from vllm_hsd.tools.planner import measure
from vllm_hsd.tools.planner.task import Task, candidates

A = ["--models", "A"]


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
def test_impossible_constraints(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with_tables(plain_profile()).save("profile.json")
    assert message in refused(capsys, "plan", "profile.json", *arguments)


def test_plans_of_several_batch_sizes_write_all_or_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = plain_profile((1, 2))
    with_tables(found).save("p-batch1.json")
    sizes = "--batch-sizes", "1,2"
    said = refused(capsys, "plan", "p-batch1.json", "-o", "p.json", *sizes)
    assert "would write over the profile" in said
    assert run("plan", "p-batch1.json", *sizes) == 0
    cascades = {Path(f"cascade-batch{size}.json") for size in (1, 2)}
    assert cascades < {*Path().iterdir()}
    # At one of them a head alone is the fastest.
    found["candidates"][0] = {"name": "head", "level": {"eagle3": "models/head"}}
    found["rates"] = [[1, 0.7, 0.9], [0.7, 1, 0.8], [0.9, 0.8, 1]]
    found["latencies"]["forward"][0]["ms"] = [[4.0], [0.5]]
    with_tables(found).save("p.json")
    before = {path: path.read_bytes() for path in cascades}
    said = refused(capsys, "plan", "p.json", *sizes, "--verifier", "standard")
    assert "--verifier standard: " in said and "by block verification: plan with --verif" in said
    assert {path: path.read_bytes() for path in cascades} == before
    assert run("plan", "p.json", *sizes) == 0


def test_a_plan_for_a_large_batch_drafts_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with_tables(plain_profile((64, 100))).save("p.json")
    assert run("plan", "p.json", "--batch-sizes", "64,100") == 0
    found = [json.loads(Path(f"cascade-batch{n}.json").read_text()) for n in (64, 100)]
    assert [each.get("disable_by_batch_size") for each in found] == [None, 100]


def test_a_profile_of_another_machine_is_planned_with_a_warning(tmp_path, capsys):
    elsewhere = {"versions": {"vllm": "0.1.0"}, "machine": {"processor": "Abacus 9"}}
    path = tmp_path / "profile.json"
    with_tables(plain_profile() | elsewhere).save(path)
    assert run("plan", path, "-o", tmp_path / "cascade.json") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "vLLM 0.1.0 and this is vLLM" in said
    assert "processor Abacus 9 and this machine has" in said
    assert re.search(r"planned in \d+\.\d\d s \(graph .*, search .*, predictions .*\)", said)
    assert json.loads((tmp_path / "cascade.json").read_text())["schema"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "T"], "the target 'T' is among its own candidates"),
        ([], "give at least one candidate"),
        ([*A, "--temperature", -1], "--temperature is -1"),
        ([*A, "--top-p", 1.5], "--top-p is 1.5"),
        ([*A, "--ngram", 0], "--ngram is 0"),
        (["--exit-heads", "D"], "no directory 'D'"),
        ([*A, "--max-draft-tokens", 0], "give 1 to 63"),
        ([*A, "--max-draft-tokens", 64], "give 1 to 63"),
        ([*A, "--batch-sizes", 0], "--batch-sizes must be at least"),
        ([*A, "--num-prompts", 0], "--num-prompts is 0"),
        (["--models", ""], "--models has an empty name"),
        (["--exits", "2,0"], "--exits has 0"),
        ([*A, "--seed", -1], "--seed is -1"),
        ([*A, "--device", "abacus"], "--device 'abacus'"),
        ([*A, "--engine-args", "{"], "--engine-args is not JSON"),
        ([*A, "--engine-args", '{"speculative_config": {}}'], "must not hold speculative_config"),
        ([*A, "--engine-args", '{"model": "y"}'], "must not hold model: use --target"),
        ([*A, "--engine-args", '{"max_num_seqs": 0}'], "but --batch-sizes 1"),
        ([*A, "-o", "x/p.json"], "no directory 'x'"),
        ([*A, "-o", "p.safetensors"], "--output must end in .json"),
        ([*A, "-o", "p.1"], "--output must end in .json"),
        ([*A, "-o", "given.json"], "write over 'given.safetensors'"),
        ([*A, "-o", "folder.json"], "'folder.json' is a directory"),
        (["--suffix", "s.safetensors", "-o", "s.json"], "write over 's.safe"),
        (["--models", *"ABCDEFGHIJKLMN"], "14 models, exits and heads are too"),
        ([*A, "--prompts", "lines.jsonl"], "line 1 of"),
    ],
)
def test_profiles_that_cannot_be_measured(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)

    (tmp_path / "lines.jsonl").write_text('{"prompt": ""}\n')
    (tmp_path / "given.safetensors").touch()
    (tmp_path / "folder.json").mkdir()
    assert message in refused(capsys, "profile", "--target", "T", *arguments)
    assert not list(tmp_path.glob("*.partial"))


def test_a_profile_on_a_gpu_is_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure.torch.cuda, "is_available", lambda: True)
    arguments = ["--target", "T", *A, "-o", tmp_path / "p.json"]
    assert "works on CPUs alone" in refused(capsys, "profile", *arguments)


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
    monkeypatch.setattr(measure, "measure_profile", mock.Mock(side_effect=KeyboardInterrupt))
    assert run("profile", "--target", "T", *A, "-o", tmp_path / "p.json") == 130
    assert "Rerun the same command to resume" in capsys.readouterr().err
