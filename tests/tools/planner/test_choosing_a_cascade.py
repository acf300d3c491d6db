"""Choosing from a profile, explaining the choice, and what `plan` writes."""

import itertools
import json
import shlex
import subprocess
import sys

import numpy as np
import pytest
from support.command_line import run

from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.tools.planner.latencies import Latencies, LatencyTable
from vllm_hsd.tools.planner.predict import Selection
from vllm_hsd.tools.planner.profile import Candidate, Profile
from vllm_hsd.tools.planner.search import Constraints, Search
from vllm_hsd.tools.planner.survival import VERIFIERS, independent_survival
from vllm_hsd.tools.system import serve_command


def table(ms, slope):
    """A forward whose tokens cost more at larger batches."""
    batches, tokens = [1, 2, 8], [1, 9]
    rows = [[ms * b**0.3 + slope * b * (t - 1) for t in tokens] for b in batches]
    return LatencyTable(batch_sizes=batches, tokens=tokens, ms=rows)


def plain(ms):
    return LatencyTable(batch_sizes=[1, 2, 8], tokens=[1], ms=[[ms]] * 3)


def make_profile(candidates, rates, *forward, tables=None):
    """Of drafts of 8 tokens; `forward` are tables of the candidates and of the target."""
    made = Profile(
        schema=3,
        target="models/target",
        candidates=candidates,
        max_draft_tokens=8,
        rates=rates,
        tables="",
        latencies=Latencies(forward=list(forward), plain=plain(9.5)),
    )
    made.set_tables(tables or dict.fromkeys(VERIFIERS, independent_survival(rates, 8)))
    return made


def candidate(name, **level):
    return {"name": name, "level": level}


MEMORY = "--gpu-memory-utilization", "0.50"


@pytest.fixture
def profile(monkeypatch):
    """Two drafters for which the cascade of both pays, and an exit that never does."""
    monkeypatch.setattr("vllm_hsd.tools.system.free_memory", lambda: 0.5)
    candidates = [
        candidate("mid", model="models/mid"),
        candidate("small", model="models/small"),
        candidate("exit 3", early_exit=3),
    ]
    rates = [[1, 0.8, 0.6, 0.85], [0.8, 1, 0.5, 0.68], [0.6, 0.5, 1, 0.5], [0.85, 0.68, 0.5, 1]]
    forward = table(1.0, 0.01), table(0.05, 0.01), table(4.0, 0.1), table(10.0, 0.05)
    return make_profile(candidates, rates, *forward)


@pytest.fixture
def with_lookup():
    """A model that accepts half of what a prompt lookup offers, as the target does."""
    survival = independent_survival([[0, 0, 0], [0, 0, 0], [0, 0.9, 0]], 8).copy()
    survival[:, 0, :, :, 1:] = 0.4
    joint = np.zeros((3, 9, 9, 9, 9))
    joint[..., 0, 0], joint[..., 8, 0], joint[..., 8, 8] = 0.4, 0.2, 0.4
    candidates = [candidate("ngram 4", ngram={"max": 4}), candidate("mid", model="models/mid")]
    rates = [[None] * 3, [None, 1, 0.9], [None, 0.9, 1]]
    forward = table(0.01, 0), table(1.0, 0.01), table(10.0, 0.05)
    tables = {"block": survival, "standard": survival, "lookup0": joint}
    return make_profile(candidates, rates, *forward, tables=tables)


def everything(search):
    """All cascades of the profile's candidates and all draft lengths that can be run, predicted."""
    order, lengths = search.graph.order, range(1, search.size + 1)
    return [
        search.predict(Selection(levels, draft_lengths))
        for depth in range(1, len(order) + 1)
        for levels in itertools.combinations(order, depth)
        for draft_lengths in itertools.combinations(lengths, depth)
    ]


@pytest.mark.parametrize(("size", "tokens"), [(8, None), (5, 24)])
def test_the_chosen_cascade_is_the_best_of_all(profile, size, tokens):
    search = Search(profile, Constraints(max_draft_tokens=size, output_tokens=tokens))
    choice = search.choose()
    times = {each.selection: each.ms_per_token for each in everything(search)}
    assert choice.best.ms_per_token == pytest.approx(min(times.values()))
    assert choice.best.selection.levels == (1, 0)
    singles = [ms for selection, ms in times.items() if len(selection.levels) == 1]
    assert choice.single.ms_per_token == pytest.approx(min(singles))
    assert choice.none.ms_per_token == 9.5
    with_exit = [ms for selection, ms in times.items() if 2 in selection.levels]
    others = {name: each.ms_per_token for name, each in choice.others}
    assert others["best with exit 3"] == pytest.approx(min(with_exit))
    listed = [each.ms_per_token for _, each in choice.others]
    assert listed == sorted(listed)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_lookup_below_a_model_is_chosen_where_it_pays(with_lookup, batch):
    search = Search(with_lookup, Constraints(batch=batch))
    choice = search.choose()
    assert choice.best.selection.levels == (0, 1)
    least = min(each.ms_per_token for each in everything(search))
    assert choice.best.ms_per_token == pytest.approx(least)


def test_nothing_drafts_for_a_head(with_lookup):
    head = Candidate.model_validate(candidate("eagle3", eagle3="models/head"))
    given = with_lookup.model_copy(update={"candidates": [with_lookup.candidates[0], head]})
    plan = Search(given, Constraints()).choose()
    every = [plan.best, plan.none, plan.single, *(found for _, found in plan.others)]
    assert {len(found.selection.levels) for found in every} == {0, 1}


def served(output):
    """The last line that `plan` printed, as arguments."""
    return shlex.split(output.strip().splitlines()[-1])


def test_plan_writes_what_the_plugin_reads_and_prints_how_to_serve_it(profile, tmp_path, capsys):
    profile.latencies.dtype = "float32"
    profile.save(tmp_path / "profile.json")
    output = tmp_path / "cascade.json"
    assert run("plan", tmp_path / "profile.json", "-o", output) == 0
    shown = capsys.readouterr().out
    for text in ("chosen", "small", "mid", "no speculation", "best single drafter", "ms/token"):
        assert text in shown
    written = json.loads(output.read_text())
    parsed = CascadeConfig.parse({"cascade": str(output)})
    choice = Search(profile, Constraints()).choose()
    assert parsed.draft_lengths == list(choice.best.selection.draft_lengths)
    assert [level.model for level in parsed.levels] == ["models/small", "models/mid"]
    assert parsed.verifier == "block"
    planned = written["planned_for"]["ms_per_token"]
    assert planned == pytest.approx(choice.best.ms_per_token, abs=1e-3)
    *command, config = served(shown)
    timed = "--dtype", "float32", *MEMORY
    assert command == [*serve_command("models/target"), *timed, "--speculative-config"]
    config = json.loads(config)
    assert config.pop("method") == "hsd" and CascadeConfig.parse(config) == parsed


def test_plan_shows_the_branches_that_a_profile_does_not_know(with_lookup, tmp_path, capsys):
    with_lookup.latencies.forward[1] = table(20.0, 1.0)
    with_lookup.save(tmp_path / "profile.json")
    run("plan", tmp_path / "profile.json", "-o", tmp_path / "cascade.json")
    captured = capsys.readouterr()
    shown = '{"sources": [{"ngram": {"max": 4, "min": 1}}], "branches": 4}'
    assert captured.err.strip().endswith(f"several in one pass, {shown}")
    config = json.loads(served(captured.out)[-1])
    assert config.pop("method") == "hsd"
    CascadeConfig.parse({**config, "levels": [json.loads(shown)]})


def test_plan_says_when_nothing_pays_and_leaves_no_stale_file(profile, tmp_path, capsys):
    profile.latencies.plain = plain(0.01)
    profile.save(tmp_path / "profile.json")
    output = tmp_path / "cascade.json"
    for done in ("did not write", "removed the older"):
        run("plan", tmp_path / "profile.json", "-o", output)
        captured = capsys.readouterr()
        said = " ".join(captured.err.split())
        assert "No speculation is the fastest" in said and done in said
        assert not output.exists()
        assert served(captured.out) == [*serve_command("models/target"), *MEMORY]
        output.write_text("{}")


def test_plan_needs_no_torch(profile, tmp_path):
    """Nor transformers and vLLM."""
    profile.save(tmp_path / "profile.json")
    code = """
import sys
from vllm_hsd.tools.cli.main import main
assert main(["plan", "profile.json"]) == 0
assert not {"torch", "transformers", "vllm"} & sys.modules.keys()
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert served(done.stdout)[0] == serve_command("")[0] and (tmp_path / "cascade.json").exists()
