"""Tables from recordings, and an engine that records."""

import json
from typing import ClassVar

import numpy as np
import pytest
from cli.command_line import run

from vllm_hsd.errors import UserError
from vllm_hsd.planner import timing
from vllm_hsd.planner.measure import Task
from vllm_hsd.planner.profile import Candidate, load_profile

CANDIDATES = [Candidate(name="mid", model="m"), Candidate(name="exit 2", early_exit=2)]


def machine(**changes):
    settings = {
        "target": "t",
        "candidates": CANDIDATES,
        "sizes": [10, 5],
        "engine_args": {"dtype": "float32"},
        "batch_sizes": [1, 4],
        "max_tokens": 8,
    }
    return timing.Machine(**{**settings, **changes})


def test_every_candidate_drafts_and_verifies_and_the_target_verifies_every_length():
    settings = machine().settings(0)
    shapes = [(tuple(s["levels"]), tuple(s["draft_lengths"])) for s in settings if s["batch"] == 1]
    assert ((0,), (4,)) in shapes and ((1,), (4,)) in shapes
    assert {b for levels, b in shapes if levels == (1, 0)} == {(1, 2), (2, 3), (4, 5), (7, 8)}
    assert {b for levels, b in shapes if levels == (0, 1)} == {(1, 2), (2, 3), (4, 5), (7, 8)}
    assert {b for levels, b in shapes if levels == (1,)} == {(1,), (2,), (4,), (7,), (8,)}
    assert {s["batch"] for s in settings} == {1, 4}
    first, second = ({s["first_prompt"] for s in machine().settings(n)} for n in (0, 1))
    assert not first & second and len(first) == len(shapes)


def test_jobs_name_all_levels():
    job = machine().job(True, [[1, 2]])
    config = job["engine"]["speculative_config"]
    assert config["levels"] == [
        {"model": "m", "num_tokens": 8},
        {"early_exit": 2, "num_tokens": 8},
    ]
    assert job["engine"]["max_num_seqs"] == 4 and job["engine"]["dtype"] == "float32"
    assert "speculative_config" not in machine().job(False, [[1, 2]])["engine"]


def recordings(rng, batches=(1, 4)):
    """Turns of 2 + 0.5 t ms (model 0) and 1 ms (model 1), with an overhead and rare pauses."""
    turns, steps = [], []
    for batch in batches:
        for tokens in range(1, 10):
            for _ in range(12):
                noise = 1 + 0.02 * rng.standard_normal() + 5 * (rng.random() < 0.05)
                ms = (2 + 0.5 * tokens) * noise
                turn = {"batch": batch, "tokens": batch * tokens, "role": "verify"}
                turns.append({**turn, "level": 0, "ms": ms, "turn_ms": ms + 0.3})
                draft = {"batch": batch, "tokens": batch, "role": "draft", "level": 1}
                turns.append({**draft, "ms": noise, "turn_ms": noise + 0.1})
                steps.append({"batch": batch, "tokens": batch * tokens, "ms": 20 * noise})
    plain = [{"steps": [{"batch": b, "tokens": b, "ms": 15.0} for b in batches for _ in range(5)]}]
    return [{"turns": turns, "steps": steps}], plain


def test_tables_are_the_times_that_were_recorded():
    costs = timing.tables(machine(), *recordings(np.random.default_rng(0)))
    for tokens in (1, 3, 5, 9):
        assert costs.forward[0].at(1, tokens) == pytest.approx(2 + 0.5 * tokens, rel=0.03)
        assert costs.turn(0, "verify", 4, tokens) == pytest.approx(2.3 + 0.5 * tokens, rel=0.03)
    assert costs.turn(1, "draft", 1, 1) == pytest.approx(1.1, rel=0.03)
    assert costs.turn(-1, "target", 4, 5) == pytest.approx(20, rel=0.03)
    assert costs.turn(-1, "plain", 1, 1) == 15.0
    assert costs.forward[0].tokens[-1] == 9
    assert costs.unrest() < 0.15 and costs.batch_sizes() == [1, 4]
    busy = costs.forward[-1]
    busy.spread = [[0.4 * ms for ms in row] for row in busy.ms]
    assert costs.unrest() == pytest.approx(0.4)
    for table in costs.forward:
        assert all(np.diff(row).min() >= 0 for row in table.ms)


def test_a_batch_that_never_ran_is_one_sentence():
    recorded = recordings(np.random.default_rng(0), batches=(1,))
    with pytest.raises(UserError, match="no step of batch size 4 was seen"):
        timing.tables(machine(), *recorded)


@pytest.mark.slow
def test_an_engine_that_cannot_start_says_why(tmp_path):
    job = machine(target=str(tmp_path / "nothing")).job(False, [[1]])
    reason = r"vLLM could not run the models for timing: .*log"
    with timing.Engine(job, tmp_path / "log") as engine, pytest.raises(UserError, match=reason):
        engine.run([])


class RecordedEngine:
    """In place of `timing.Engine`: answers from recordings and counts what is asked of it."""

    asked: ClassVar[list] = []
    alive = 0

    def __init__(self, job, log):
        self.speculates = "speculative_config" in job["engine"]

    def __enter__(self):
        RecordedEngine.alive += 1
        return self

    def __exit__(self, *exception):
        RecordedEngine.alive -= 1

    def run(self, settings, advance):
        if len(self.asked) == 3:
            self.asked.append("interrupted")
            raise KeyboardInterrupt
        self.asked.append(("cascades" if self.speculates else "plain", self.alive))
        cascades, plain = recordings(np.random.default_rng(0))
        advance(len(settings))
        return cascades if self.speculates else plain


@pytest.mark.parametrize("gpu", [False, True])
def test_engines_take_turns_and_an_interrupted_measurement_continues(tmp_path, monkeypatch, gpu):
    monkeypatch.setattr(timing, "Engine", RecordedEngine)
    monkeypatch.setattr(RecordedEngine, "asked", [])
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(KeyboardInterrupt):
        timing.measure_costs(machine(), [[1]], tmp_path)
    done = []
    costs = timing.measure_costs(machine(), [[1]], tmp_path, done.append)
    asked = [name for name in RecordedEngine.asked if name != "interrupted"]
    assert done[-1] == timing.settings_in_all(machine())
    assert costs.turn(-1, "plain", 1, 1) == 15.0
    assert RecordedEngine.alive == 0
    names = [name for name, _ in asked]
    if gpu:
        assert names == ["cascades"] * timing.PASSES + ["plain"] * timing.PASSES
        assert {alive for _, alive in asked} == {1}
    else:
        assert names == ["cascades", "plain"] * timing.PASSES
        assert asked[-1][1] == 2


def test_an_engine_records_every_turn_and_step(text_family, tmp_path):
    """A single draft, then a cascade of other levels, in one engine."""
    models = [text_family.small, text_family.mid]
    job = machine(
        target=text_family.target,
        candidates=[Candidate(name=path, model=path) for path in models],
        batch_sizes=[2],
        max_tokens=4,
        engine_args={
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 128,
            "kv_cache_memory_bytes": 1 << 26,
        },
    ).job(True, [[5, 9, 30], [7, 80, 81, 12]])
    settings = [
        {"levels": [1], "draft_lengths": [3], "batch": 1, "tokens": 24, "first_prompt": 0},
        {"levels": [0, 1], "draft_lengths": [2, 4], "batch": 2, "tokens": 24, "first_prompt": 1},
    ]
    done = []
    with timing.Engine(job, tmp_path / "log") as engine:
        single, cascade = engine.run(settings, done.append)
        (again,) = engine.run(settings[:1])
    assert done == [1, 2]
    assert again["emitted"] == single["emitted"]  # seeded: the same text
    full = [step for step in single["steps"] if step["tokens"] == 4]
    assert {step["batch"] for step in single["steps"]} == {1}
    assert {turn["level"] for turn in single["turns"]} == {1}
    assert {turn["role"] for turn in single["turns"]} == {"draft"}
    # The first draft comes with the prefill, which is not timed.
    assert 3 * (len(full) - 1) <= len(single["turns"]) <= 3 * len(single["steps"]) + 3
    # The prefill makes the first token of a request, decoding all others.
    assert single["emitted"] == 24 - 1 and cascade["emitted"] == 2 * (24 - 1)
    assert len(single["steps"]) < single["emitted"]
    # Turns and steps share out the time, but for the drafts that come with the prefill; after the
    # last token the level only catches up with it.
    assert all(step["ms"] > 0 and step["drafting_ms"] > 0 for step in single["steps"])
    drafting = sum(step["drafting_ms"] for step in single["steps"][1:])
    assert sum(turn["turn_ms"] for turn in single["turns"][:-1]) == pytest.approx(drafting)
    assert {(t["level"], t["role"]) for t in cascade["turns"]} == {(0, "draft"), (1, "verify")}
    assert max(turn["tokens"] / turn["batch"] for turn in cascade["turns"]) <= 5
    assert max(step["batch"] for step in cascade["steps"]) == 2


@pytest.mark.slow
def test_profile_command_measures_everything(text_family, tmp_path, capsys):
    """From the command line to a plan, through real engines."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n\nworld of words\n\nand a third\n\n")
    path = tmp_path / "profile.json"
    engine = {"enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 1 << 28}
    status = run(
        "profile", "--target", text_family.target, "--candidates", text_family.small,
        "--early-exits", 1, "--prompts", prompts, "--max-draft-tokens", 4, "--batch-sizes", 1, 2,
        "--engine-args", json.dumps(engine), "-o", path,
    )  # fmt: skip
    assert status == 0 and not path.with_name("profile.json.parts").exists()
    assert "ms/forward" in capsys.readouterr().out
    profile = load_profile(path)
    assert profile.names == ["small", "exit 1", "target"]
    assert profile.costs.plain.batch_sizes == [1, 2]
    assert profile.versions["vllm"] and profile.prompts.prompts == 3
    assert run("plan", path, "-o", tmp_path / "cascade.json") == 0


def test_candidates_of_a_task_are_models_then_exits(tmp_path):
    task = Task("t", ["a/small", "b/mid"], [2, 4], tmp_path)
    assert [c.name for c in task.named_candidates()] == ["small", "mid", "exit 2", "exit 4"]
    alike = Task("t", ["a/model", "b/model"], [], tmp_path)
    assert [c.name for c in alike.named_candidates()] == ["a/model", "b/model"]


def test_profile_command_without_costs_and_prompts(text_family, tmp_path, capsys):
    path = tmp_path / "profile.json"
    status = run(
        "profile", "--target", text_family.target, "--candidates", text_family.mid,
        "--max-prompts", 8, "--max-draft-tokens", 3, "--skip-timing", "-o", path,
    )  # fmt: skip
    assert status == 0 and list(tmp_path.iterdir()) == [path]
    captured = capsys.readouterr()
    assert "No --prompts" in captured.err and "acceptance rates" in captured.out
    profile = load_profile(path)
    assert profile.costs is None and profile.prompts.file == ""
    assert 0.5 < profile.rate_matrix()[0, 1] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-draft-tokens", 0], "must be at least 1"),
        (["--batch-sizes", 0], "--batch-sizes must be at least 1"),
        (["--prompts", "nowhere.jsonl"], "no prompts file 'nowhere.jsonl'"),
    ],
)
def test_profile_command_refuses(text_family, tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        run("profile", "--target", text_family.target, "--candidates", text_family.mid,
            "-o", tmp_path / "p.json", *arguments)  # fmt: skip


def test_local_folders_are_written_whole(monkeypatch, tmp_path):
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    task = Task("t", ["small", "some/name"], [], tmp_path)
    models = [c.model for c in task.named_candidates()]
    assert models == [str(tmp_path / "small"), "some/name"]
