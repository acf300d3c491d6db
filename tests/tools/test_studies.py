"""Studies of the chat model: turns, rows, resuming, figures; without engines."""

import argparse
import copy
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from support.bench_check import SETUP, make_comparison

from benchmarks import columns, plot, results, shared_engines, sweep
from benchmarks.columns import Table
from benchmarks.studies import demo, papers
from benchmarks.studies.configs import fixed
from benchmarks.sweep import PLAIN, Group, Sweep
from vllm_hsd.tools.engine import Generation

CONFIG = {"method": "ngram", "num_speculative_tokens": 2}
SETS = {"a": [0, 1], "b": [2, 3]}
STUDIES = Path(sweep.__file__).parent / "studies"


class FakeEngines:
    """Engines that are faster the later they stand, interrupted at one prompt.

    hosts: by configuration, the one whose engine serves it, if not its own.
    """

    breaks_at = None

    def __init__(self):
        self.asked, self.hosts, self.loaded = [], {}, {}

    def get(self, index):
        engine = self.loaded.setdefault(self.hosts.get(index, index), copy.copy(self))
        engine.index = index
        return engine

    def generate(self, prompts, params, on_text=lambda *_: None, max_concurrency=None):
        if max_concurrency:
            self.asked.append((prompts, [each["max_tokens"] for each in params], max_concurrency))
            params = params[0]
        if prompts[0] == self.breaks_at:
            raise KeyboardInterrupt
        self.asked.append((self.index, len(prompts)))
        seconds = 8 - self.index
        on_text(0, "te")
        on_text(0, "xt")
        ids = [[1] * params["max_tokens"]] * len(prompts)
        first = [seconds / 4] * len(prompts)
        steps = [params["max_tokens"] - self.index] * len(prompts)
        return Generation(ids, ["text"] * len(prompts), seconds, seconds, first, first, steps)


def engines_of(configs, tmp_path, prompts=4):
    comparison = make_comparison(tmp_path, [None, *configs.values()], "uvwxyz"[:prompts])
    setup = replace(SETUP, prompt_ids=[[n] for n in range(1, prompts + 1)])
    return Sweep([PLAIN, *configs], comparison, setup, FakeEngines())


def test_an_engine_that_goes_on_with_another_configuration_is_warm(tmp_path):
    engines = engines_of(dict.fromkeys("ab", CONFIG), tmp_path)
    engines.engines.hosts = {2: 1}
    (cell,) = Group("g", {}, [0.0]).cells({"s": [0]})
    engines.answer(cell, 0)
    assert [index for index, _ in engines.engines.asked] == [0, 0, 1, 1, 2]


def test_configurations_answer_in_an_order_that_rotates(tmp_path):
    engines = engines_of(dict.fromkeys("abc", CONFIG), tmp_path)
    (few,) = Group("g", {}, [0.0], [4]).cells({"s": [0, 1]})
    assert few.batches == [(0, 1, 0, 1)]
    (cell,) = Group("g", {}, [0.0], [2]).cells({"s": [0, 1, 2, 3, 0]})
    assert cell.batches == [(0, 1), (2, 3), (0, 0)]
    for part in range(3):
        engines.answer(cell, part, turn=1)
    turns = [1, 2, 3, 0, 2, 3, 0, 1, 3, 0, 1, 2]
    # No engine's answer is its first pass after another one's.
    assert engines.engines.asked == [(i, size) for i in turns for size in (1, 2)]
    rows = engines.rows([cell])
    assert [row["speedup"] for row in rows] == pytest.approx([1, 8 / 7, 8 / 6, 8 / 5])
    assert rows[3]["first_token"] == pytest.approx(5 / 8)
    assert rows[3]["speedup_low"] == pytest.approx(8 / 5)
    table = Table(tmp_path / "table.csv")
    assert not table.has(**cell.key)
    table.add(rows)
    assert Table(table.path).has(**cell.key) and not table.has(**{**cell.key, "temperature": 1.0})


def test_with_streams_requests_of_all_sets_follow_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FEWEST", 3)
    streams = results.in_turn([[0, 1, 2], [3]], [1, 2])
    assert streams == {
        1: [(0, 3, 1), (3, 2, 3), (0, 3, 1), (3, 2, 3)],
        2: [(0, 3, 1, 3, 2), (3, 0, 3, 1, 3), (2, 3, 0, 3, 1), (3, 2, 3, 0, 3)],
    }
    engines = engines_of({}, tmp_path)
    (alone, cell, _) = Group("g", {}, [0.0], streams=streams).cells({"s": [0]})
    assert (alone.key["set"], alone.key["batch_size"]) == ("s", 1)
    assert (cell.key["set"], cell.key["batch_size"]) == (sweep.MIX, 1)
    engines.answer(cell, 0)
    # Five tokens on average, no two neighbours end together.
    assert engines.engines.get(0).asked[-2] == ([[1], [4], [2]], [3, 5, 7], 1)


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """A function that measures two groups of two temperatures and gives the rows."""

    def started(chosen, configs, prompts, **_):
        return nullcontext(engines_of(configs, tmp_path))

    monkeypatch.setattr(sweep, "started", started)

    def run(configs="abc", dtype="auto", compiled=True):
        table = Table(tmp_path / "table.csv")
        groups = [Group(name, dict.fromkeys(configs, CONFIG), [0.0, 0.5]) for name in ("g", "h")]
        chosen = argparse.Namespace(max_tokens=5, dtype=dtype, compiled=compiled)
        sweep.fill(table, groups, chosen, "wxyz", SETS)
        return table.rows

    return run


def test_a_run_goes_on_where_it_was_stopped(measure, monkeypatch):
    monkeypatch.setattr(FakeEngines, "breaks_at", [4])
    with pytest.raises(KeyboardInterrupt):
        measure()
    monkeypatch.setattr(FakeEngines, "breaks_at", [1])
    with pytest.raises(KeyboardInterrupt):  # set "a" again, at another temperature
        measure()
    monkeypatch.setattr(FakeEngines, "breaks_at", None)
    rows = measure()
    keys = [(row["group"], row["set"], row["temperature"], row["configuration"]) for row in rows]
    assert len(keys) == len(set(keys))
    monkeypatch.setattr(FakeEngines, "breaks_at", [1])
    assert len(measure()) == len(rows)
    with pytest.raises(KeyboardInterrupt):
        measure(dtype="another")
    with pytest.raises(KeyboardInterrupt):
        measure(compiled=False)
    monkeypatch.setattr(FakeEngines, "breaks_at", None)
    # A configuration that was left out is measured next to the others, which are measured again.
    assert len(measure("abcd")) == len(rows) // 4 * 5


def test_what_runs_engines_in_turn_is_for_hosts(tmp_path, monkeypatch):
    chosen = argparse.Namespace(
        model="m", max_tokens=5, dtype="auto", compiled=True, output=tmp_path
    )
    prepared = mock.Mock(side_effect=lambda comparison: (comparison, replace(SETUP, device="GPU")))
    monkeypatch.setattr(sweep.bench, "prepare", prepared)
    with pytest.raises(SystemExit, match="engines take turns on the memory of a host"):
        next(sweep.started.__wrapped__(chosen, {}, "w", temperatures=[0.0]))


def test_lengths_are_those_of_the_highest_level_that_took_part():
    lookup, unused = ({"requested": n, "drafted": 3 * n, "empty": 1} for n in (2, 0))
    answer = mock.Mock(levels=[lookup, unused])
    assert columns.chosen([answer, answer]) == {"draft_length": 3.0, "no_draft": 0.5}


def test_the_demo_answers_every_prompt_and_shows_it(tmp_path, capsys):
    engines = engines_of({"lookup": CONFIG}, tmp_path, prompts=6)
    cells = demo.measure(engines, ["a", "b"], 3, time.monotonic() + 1000)
    assert [cell.batches for cell in cells[:2]] == [[(0,), (1,), (2,)], [(3,), (4,), (5,)]]
    # A line for every answer where there is no terminal.
    assert capsys.readouterr().out.count("text ...") == 2 * 2 * 6
    assert engines.compare() == []
    rows = [row for cell in cells for row in engines.rows([cell])]
    rows += [row for t in (0, 1) for row in engines.rows(cells[2 * t : 2 * t + 2], set=demo.ALL)]
    assert [row["batches"] for row in rows[-2:]] == [6, 6]
    engines.results.loads = dict.fromkeys(engines.results.loads, (0.9, 0.0))
    demo.print_notes(engines.results, rows)
    demo.print_tables(rows)
    printed = capsys.readouterr().out
    assert printed.startswith("Disturbed: other processes used 0.9 of")
    assert "1.14 (1.14-1.14)" in printed
    path = tmp_path / "demo.png"
    plot.bars(rows, path, x="set", panel="temperature", measure="speedup")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("seconds", "count", "temperatures"),
    [(1000, 5, 2), (80, 5, 1), (55, 4, 1), (45, 3, 1), (0, 3, 1)],
)
def test_a_slow_machine_shows_fewer_configurations(
    tmp_path, monkeypatch, capsys, seconds, count, temperatures
):
    """Engines of five seconds, a round of ten for each configuration."""
    engines, clock = engines_of(dict.fromkeys("abcd", CONFIG), tmp_path), [0]
    monkeypatch.setattr(demo.time, "monotonic", lambda: clock[0])
    load = engines.engines.get
    monkeypatch.setattr(engines.engines, "get", lambda i: clock.append(clock.pop() + 5) or load(i))
    assert len(demo.start(engines, 10, seconds)) == temperatures
    assert engines.names == [PLAIN, *"abcd"[: count - 1]]
    assert len(engines.engines.loaded) == count - 1
    printed = capsys.readouterr().out
    assert ("left out: " in printed) == (count < 5 or temperatures < 2)
    assert all(f"{name}, " in printed for name in "abcd"[count - 1 :])


def test_the_page_of_results_has_the_rows_of_their_table():
    page = (STUDIES.parents[1] / "docs" / "results.md").read_text()
    rows = Table(STUDIES.parent / "results.csv").rows
    assert "\n".join(results.tables(results.shown(rows))) in page


def test_cascades_share_the_engine_of_one_with_their_levels():
    suffix, copy = {"suffix": {}}, {"model": "copy"}
    deep = fixed({**suffix, "num_tokens": 4}, {"early_exit": 1, "num_tokens": 6}, copy, length=12)
    hosted = [
        (None, (0, [])),
        (deep, (1, [0, 1, 2])),
        (fixed({**suffix, "num_tokens": 3}, copy, length=8), (1, [0, 2])),
        (fixed(suffix, length=8), (3, [])),
        (fixed(suffix, length=4), (1, [0])),
        (fixed(copy, adaptive=True), (5, [])),
        (fixed({"model": "other"}), (6, [])),
    ]
    found = shared_engines.hosts([config for config, _ in hosted])
    assert found == dict(enumerate(host for _, host in hosted))


def test_a_study_hosts_its_engines_and_draws_its_groups(monkeypatch, tmp_path):
    hosted = {}
    monkeypatch.setattr(papers, "qwen_coder", lambda size: tmp_path / size)
    monkeypatch.setattr(papers, "int8_copy", lambda source: source.with_name("int8"))
    groups = papers.groups()
    # The memory of a machine of the family holds three targets at once.
    for group in groups.values():
        found = shared_engines.hosts([None, *group.configs.values()])
        assert len({host for host, _ in found.values()}) <= 3

    def started(chosen, configs, prompts, **keys):
        hosted.update(keys)
        return nullcontext(engines_of(configs, tmp_path))

    monkeypatch.setattr(sweep, "started", started)
    monkeypatch.setattr(sweep, "read_sets", lambda *_: (list("wxyz"), SETS))
    monkeypatch.setattr("sys.argv", ["papers", "--groups", "levels", "--output", str(tmp_path)])
    assert papers.main() == 0
    assert hosted["engines_class"] is shared_engines.SharedEngines
    rows, configs = Table(tmp_path / "papers.csv").rows, groups["levels"].configs
    assert {row["set"] for row in rows} == set(SETS) and len(rows) == 2 * (1 + len(configs))
    assert (tmp_path / "papers.png").read_bytes().startswith(b"\x89PNG")
