"""Tables from recordings, and an engine that records."""

import contextlib
import functools
import json
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
from support.command_line import run
from support.eagle3_head import write_eagle3_head
from support.engines import forked

from vllm_hsd.cascade.text_store import collect_texts, write_store
from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.errors import UserError
from vllm_hsd.tools.engine import EngineProcess
from vllm_hsd.tools.planner import timing
from vllm_hsd.tools.planner.profile import Sampling, load_profile
from vllm_hsd.tools.planner.task import Task, candidates
from vllm_hsd.tools.planner.timing import Timing

MODEL_AND_EXIT = candidates(models=["m"], exits=[2])


def make_timing(tmp_path, candidates=MODEL_AND_EXIT, sizes=(1, 4)):
    engine = {"dtype": "float32"}
    task = Task("t", candidates, max_draft_tokens=8, batch_sizes=[*sizes], engine_args=engine)
    return Timing(task, [[1, 2]], 50, tmp_path)


def shapes(found):
    return [(tuple(s["levels"]), tuple(s["draft_lengths"])) for s in found if s["batch"] == 1]


def test_batches_of_any_size_draft_while_they_are_timed(tmp_path):
    for sizes, most in (((1, 4), 64), ((1, 128), 128)):
        found = make_timing(tmp_path, sizes=sizes).engine_args(speculative=True)
        assert found["speculative_config"]["disable_by_batch_size"] == most


def test_every_candidate_drafts_and_verifies_and_the_target_verifies_every_length(tmp_path):
    found = make_timing(tmp_path).settings(0)
    cascades = shapes(found)
    assert ((0,), (4,)) in cascades and ((1,), (4,)) in cascades
    # Candidate 2 is the bigram model that drafts for the others.
    for i in range(2):
        below = {b for levels, b in cascades if levels == (2, i)}
        assert below == {(1, 2), (2, 3), (4, 5), (7, 8)}
    assert {b for levels, b in cascades if levels == (2,)} == {(1,), (2,), (4,), (7,), (8,)}
    assert {s["batch"] for s in found} == {1, 4}
    again = make_timing(tmp_path).settings(1)
    first, second = ({s["first_prompt"] for s in settings} for settings in (found, again))
    assert not first & second and len(first) == len(cascades)


def recordings():
    """Calls of 2 + 0.5 t ms (model 0) and 1 ms (model 1), with an overhead and rare pauses."""
    rng, batches = np.random.default_rng(0), (1, 4)
    calls, steps = [], []
    for batch in batches:
        for tokens in range(1, 10):
            for _ in range(12):
                noise = 1 + 0.02 * rng.standard_normal() + 5 * (rng.random() < 0.05)
                ms = (2 + 0.5 * tokens) * noise
                call = {"batch": batch, "tokens": batch * tokens, "role": "verify"}
                calls.append({**call, "level": 0, "ms": ms, "call_ms": ms + 0.3})
                draft = {"batch": batch, "tokens": batch, "role": "draft", "level": 1}
                calls.append({**draft, "ms": noise, "call_ms": noise + 0.1})
                steps.append({"batch": batch, "tokens": batch * tokens, "ms": 20 * noise})
    plain = [{"batch": b, "tokens": b, "ms": 15.0} for b in batches for _ in range(5)]
    load = {"other_cores": 0.0, "steal": 0.0}
    return [{"calls": calls, "steps": steps, **load}], [{"steps": plain, **load}]


def test_requests_have_no_seed_which_would_choose_another_verifier(tmp_path):
    engine, found = mock.Mock(), make_timing(tmp_path)
    engine.call.return_value = {"calls": []}
    found.run(engine, found.plain_settings(1)[:1])
    _, _, params = engine.call.call_args.args
    assert params["temperature"] == 1 and "seed" not in params


def test_tables_are_the_times_that_were_recorded(tmp_path):
    found = make_timing(tmp_path).latencies(*recordings())
    for tokens in (1, 3, 5, 9):
        assert found.forward[0].at(1, tokens) == pytest.approx(2 + 0.5 * tokens, rel=0.03)
        assert found.call(0, "verify", 4, tokens) == pytest.approx(2.3 + 0.5 * tokens, rel=0.03)
    assert found.call(1, "draft", 1, 1) == pytest.approx(1.1, rel=0.03)
    assert found.call(1, "lookup", 1, 1) == pytest.approx(1.0, rel=0.03)
    assert found.call(-1, "target", 4, 5) == pytest.approx(20, rel=0.03)
    assert found.call(-1, "plain", 1, 1) == 15.0
    assert found.forward[0].tokens[-1] == 9
    assert found.relative_spread() < 0.15 and found.batch_sizes() == [1, 4]
    busy = found.forward[-1]
    busy.spread = [[0.4 * ms for ms in row] for row in busy.ms]
    assert found.relative_spread() == pytest.approx(0.4)
    for table in found.forward:
        assert all(np.diff(row).min() >= 0 for row in table.ms)


def test_a_pass_that_takes_longer_over_fewer_tokens_is_told_from_noise(tmp_path):
    """As measured of a 1.5B in 16 bits on an older CPU; between 3 and 5 there is noise alone."""
    (cascade,), plain = recordings()
    taken = {1: 230, 2: 266, 3: 195, 4: 193, 5: 195, 6: 195, 7: 238, 8: 253, 9: 261}
    for step in cascade["steps"]:
        step["ms"] *= taken[step["tokens"] // step["batch"]] / 20
    times = make_timing(tmp_path).latencies([cascade], plain).forward[-1]
    for tokens, ms in taken.items():
        assert times.at(1, tokens) == pytest.approx(ms, rel=0.03)
    assert times.at(1, 3) <= times.at(1, 4) <= times.at(1, 5)


def test_a_disturbed_machine_is_written_down(tmp_path):
    """Two passes of the plain engine a fifth apart, other processes on half a core."""
    cascades, (plain,) = recordings()
    slower = [{**step, "ms": 1.2 * step["ms"]} for step in plain["steps"]]
    again = {"steps": slower, "other_cores": 0.5, "steal": 0.03}
    load = make_timing(tmp_path).latencies(cascades, [plain, again, again]).load
    assert load.model_dump() == {"other_cores": 0.25, "steal": 0.015, "drift": 0.2}
    others, drift = load.sentences()
    assert "other processes used 0.2 of" in others and "differ by 20%" in drift
    assert load.sentences(on_host=False) == [drift]


class RecordedTiming(Timing):
    """Answers from recordings in place of engines, and counts what is asked of it."""

    asked: ClassVar[list] = []
    alive = 0

    @contextlib.contextmanager
    def engine(self, speculative):
        self.alive += 1
        try:
            yield speculative
        finally:
            self.alive -= 1

    def run(self, engine, settings, advance=lambda: None):
        self.asked.append(("cascades" if engine else "plain", self.alive))
        if len(self.asked) == 3:
            raise KeyboardInterrupt
        for _ in settings:
            advance()
        cascades, plain = recordings()
        return cascades if engine else plain


def test_engines_alternate_and_an_interrupted_measurement_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(RecordedTiming, "asked", [])
    task = make_timing(tmp_path).task
    store = tmp_path / "timing.json"
    with pytest.raises(KeyboardInterrupt):
        RecordedTiming(task, [[1]], 50, tmp_path).measure(store)
    done = []
    timed = RecordedTiming(task, [[1]], 50, tmp_path)
    found = timed.measure(store, lambda: done.append(1))
    names, alive = zip(*RecordedTiming.asked, strict=True)
    assert len(done) == timed.num_settings
    assert found.call(-1, "plain", 1, 1) == 15.0
    assert timed.alive == 0
    # The interrupted one is asked again.
    assert names[:2] + names[3:] == ("cascades", "plain") * timing.PASSES
    assert alive[-1] == 2


@pytest.fixture
def timing_of(text_family, tmp_path, monkeypatch):
    """A function of prompts and candidates -> `Timing` of an engine that is forked."""
    monkeypatch.setattr(timing, "EngineProcess", functools.partial(EngineProcess, **forked()))
    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128}
    engine["kv_cache_memory_bytes"] = 1 << 26

    def of(prompts, **kinds):
        target, found = text_family.target, candidates(**kinds)
        task = Task(target, found, Sampling(), 4, batch_sizes=[2], engine_args=engine)
        return Timing(task, prompts, text_family.vocabulary, tmp_path)

    return of


def test_an_engine_records_every_call_and_step(timing_of, text_family):
    """A single drafter, a cascade, and a lookup below a model, in one engine; of a prompt that is
    longer than the engine's texts, the end."""
    prompts = [[5, 9, 30], [3] * 200 + [7, 80, 81, 12], [5, 6, 7, 5, 6, 7, 5]]
    timed = timing_of(prompts, models=[text_family.small, text_family.mid], ngram=3)
    settings = [
        {"levels": [2], "draft_lengths": [3], "batch": 1, "tokens": 24, "first_prompt": 0},
        {"levels": [1, 2], "draft_lengths": [2, 4], "batch": 2, "tokens": 24, "first_prompt": 1},
        {"levels": [0, 1], "draft_lengths": [2, 4], "batch": 1, "tokens": 24, "first_prompt": 2},
    ]
    done = []
    with timed.engine(True) as engine:
        single, cascade, lookup = timed.run(engine, settings, lambda: done.append(1))
        (again,) = timed.run(engine, settings[:1])
    assert len(done) == 3
    assert again["emitted"] == single["emitted"]
    full = [step for step in single["steps"] if step["tokens"] == 4]
    assert {step["batch"] for step in single["steps"]} == {1}
    assert {(c["level"], c["role"]) for c in single["calls"]} == {(2, "draft")}
    # The first draft comes with the prefill, which is not timed.
    assert 3 * (len(full) - 1) <= len(single["calls"]) <= 3 * len(single["steps"]) + 3
    assert single["other_cores"] >= 0 and 0 <= single["steal"] <= 1
    # The prefill emits the first token of a request, decoding all others.
    assert single["emitted"] == 24 - 1 and cascade["emitted"] == 2 * (24 - 1)
    assert len(single["steps"]) < single["emitted"]
    # Calls and steps share out the time, but for the drafts that come with the prefill.
    assert all(step["ms"] > 0 for step in single["steps"])
    assert all((step["drafting_ms"] > 0) == (step["tokens"] > 1) for step in single["steps"])
    drafting = sum(step["drafting_ms"] for step in single["steps"][1:])
    assert sum(call["call_ms"] for call in single["calls"]) == pytest.approx(drafting)
    assert {(c["level"], c["role"]) for c in cascade["calls"]} == {(1, "draft"), (2, "verify")}
    assert max(call["tokens"] / call["batch"] for call in cascade["calls"]) <= 5
    assert max(step["batch"] for step in cascade["steps"]) == 2
    assert {(c["level"], c["role"]) for c in lookup["calls"]} == {(0, "lookup"), (1, "verify")}


def test_lowest_levels_are_sources_of_one(tmp_path):
    """An engine has one lowest level: what is a candidate for it is one of its sources, or some."""
    found = candidates(models=["m"], ngram=3, suffix="", bigram="b", eagle3="h")
    names = [each.name for each in found]
    assert names == ["ngram 3", "suffix", "bigram", "ngram 3+suffix+bigram", "eagle3", "m"]
    timed = make_timing(tmp_path, found)
    kinds = {"ngram": {"max": 3}}, {"suffix": {}}, {"bigram": "b"}, {"eagle3": "h"}
    filler = {"bigram_model": timed.filler}
    assert timed.levels == [{"sources": list(kinds), "branches": 1}, filler, {"model": "m"}]
    alone, together = {i: (0, [i]) for i in range(3)}, (0, [0, 1, 2])
    assert timed.places == alone | {3: together, 4: (0, [3]), 5: (2, None), 6: (1, None)}
    config = timed.engine_args(True)["speculative_config"]
    CascadeConfig.parse({key: config[key] for key in config if key != "method"})
    cascades = shapes(timed.settings(0))
    assert {levels for levels, _ in cascades} == {(0,), (1,), (2,), (3,), (4,), (5,), (6,), (6, 5)}
    one = make_timing(tmp_path, candidates(models=["m"], ngram=3))
    assert one.levels == [{"ngram": {"max": 3}}, filler, {"model": "m"}]
    assert one.places == {0: (0, None), 1: (2, None), 2: (1, None)}


def test_an_engine_records_sources_alone_and_together(timing_of, text_family, tmp_path):
    """Lookups, both of them, a head, and these below a model, in one engine."""
    size = text_family.vocabulary
    head = write_eagle3_head(text_family.target, tmp_path / "head", draft_vocabulary=size - 8)
    store = str(tmp_path / "pairs.safetensors")
    write_store(collect_texts([np.arange(size).repeat(2)], size), store)
    levels = {"models": [text_family.mid], "ngram": 3, "bigram": store, "eagle3": head}
    timed = timing_of([[5, 6, 7, 5, 6, 7, 5]], **levels)
    cascades = [[0], [1], [2], [3], [2, 4], [3, 4], [4]]
    settings = [
        {"levels": c, "draft_lengths": [2, 4][-len(c) :], "batch": 2, "tokens": 16,
         "first_prompt": 0}
        for c in cascades
    ]  # fmt: skip
    with timed.engine(True) as engine:
        recorded = timed.run(engine, settings)
        with pytest.raises(UserError, match=r"sources \[3\] are not among the level's 3"):
            engine.select_levels([0], [4], [3])
    for cascade, recording in zip(cascades, recorded, strict=True):
        roles = {(call["level"], call["role"]) for call in recording["calls"]}
        lowest = "lookup" if cascade[0] < 3 else "draft"
        assert roles == {(cascade[0], lowest), *((i, "verify") for i in cascade[1:])}
        assert recording["emitted"] == 2 * (16 - 1)  # the prefill emits the first
        if cascade == [3]:
            # A head reads what a step has kept before its first token.
            assert {call["tokens"] // call["batch"] for call in recording["calls"]} > {1}


@pytest.mark.slow
def test_profile_command_measures_everything(text_family, tmp_path, capsys):
    """From the command line to a plan, through real engines."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n\nworld of words\n\nand a third\n\n")
    path, table = tmp_path / "profile.json", tmp_path / "pairs"
    size = text_family.vocabulary
    write_store(collect_texts([np.arange(size)], size), str(table))
    head = write_eagle3_head(text_family.target, tmp_path / "head", size - 8, trained=True)
    engine = {"enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 1 << 28}
    status = run(
        "profile", "--target", text_family.target, "--models", text_family.small,
        "--exits", 1, "--bigram-model", table, "--ngram", "--bigram", table,
        "--eagle3", head, "--prompts", prompts, "--max-draft-tokens", 4,
        "--batch-sizes", "1,2", "--engine-args", json.dumps(engine), "-o", path,
    )  # fmt: skip
    assert status == 0 and not path.with_name("profile.json.partial").exists()
    assert "ms/forward" in capsys.readouterr().out
    profile = load_profile(path)
    lookups = ["ngram 4", "bigram", "ngram 4+bigram"]
    assert profile.names == [*lookups, "eagle3", "bigram model", "small", "exit 1", "target"]
    assert profile.lookups == [0, 1, 2] and 0 < profile.rate_matrix()[3, -1] < 1
    assert profile.latencies.plain.batch_sizes == [1, 2]
    assert profile.versions["vllm"] and profile.prompts.prompts == 3
    assert run("plan", path, "-o", tmp_path / "cascade.json") == 0
    assert "best with eagle3" in capsys.readouterr().out


def test_profile_command_without_timing_and_prompts(text_family, tmp_path, capsys):
    path = tmp_path / "profile.json"
    status = run(
        "profile", "--target", text_family.target, "--models", text_family.mid, "--ngram", 2,
        "--num-prompts", 8, "--max-draft-tokens", 3, "--skip-timing", "-o", path,
    )  # fmt: skip
    assert status == 0
    assert {p.name for p in tmp_path.iterdir()} == {"profile.json", "profile.safetensors"}
    captured = capsys.readouterr()
    assert "No --prompts" in captured.err and "acceptance rates" in captured.out
    profile = load_profile(path)
    assert profile.latencies is None and profile.prompts.file == ""
    assert 0.5 < profile.rate_matrix()[1, 2] < 1 and profile.lookups == [0]
    assert run("plan", path, "-o", tmp_path / "cascade.json") == 2
    assert "on a CPU, without --skip-timing; on a GPU compare" in capsys.readouterr().err
