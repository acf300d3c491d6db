"""Studies of the chat model: turns, rows, resuming, figures; without engines."""

import argparse
import csv
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import plot, sweep
from benchmarks.studies import adaptive, configs, demo, real_model, streams, workloads
from benchmarks.sweep import COLUMNS, PLAIN, Cell, Group, Sweep, Table
from vllm_hsd.cli.bench_jobs import Comparison, Setup
from vllm_hsd.engine import Generation

CONFIG = {"method": "ngram", "num_speculative_tokens": 2}
SETS = {"a": [0, 1], "b": [2, 3]}
STUDIES = Path(sweep.__file__).parent / "studies"


class FakeEngines:
    """Engines that are faster the later they stand, and twice as fast with a warm prefix cache.

    Attributes:
        breaks_at: prompt at which the first engine is interrupted.
    """

    breaks_at = None

    def __init__(self, *_):
        self.asked, self.warm, self.caching = [], False, False

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def get(self, index):
        self.index = index
        return self

    def call(self, function, *arguments):
        if function is sweep.empty_prefix_cache:
            self.warm, self.caching = False, True
            return None
        assert function is streams.keep_streams
        _, count, seconds, _ = arguments
        levels = [{"requested": 8.0, "empty": 4.0, "drafted": 16.0}] if self.index else []
        faster = 2 if self.index else 1
        return streams.Served(count * 10 * faster, seconds, [0.1], [0.1 / faster], levels)

    def generate(self, prompts, params, on_text=lambda *_: None):
        if prompts[0] == self.breaks_at:
            raise KeyboardInterrupt
        self.asked.append((self.index, self.warm, len(prompts)))
        seconds = (8 - self.index) / (1 + self.warm)
        self.warm = self.caching
        on_text(0, "te")
        on_text(0, "xt")
        ids = [[1] * params["max_tokens"]] * len(prompts)
        first = [seconds / 4] * len(prompts)
        steps = [params["max_tokens"] - self.index] * len(prompts)
        return Generation(ids, ["text"] * len(prompts), seconds, seconds, first, first, steps)


def engines_of(configs, tmp_path, prompts=4):
    comparison = Comparison(
        model="m",
        configs=[None, *configs.values()],
        prompts=list("uvwxyz"[:prompts]),
        batch_sizes=[1],
        temperatures=[0.0],
        max_tokens=5,
        num_prompts=prompts,
        rounds=1,
        engine_args={},
        output=tmp_path,
    )
    ids = [[n] for n in range(1, prompts + 1)]
    setup = Setup([None] * 9, ids, True, 1000, "float32", "cpu", 1, 1 << 40)
    return Sweep([PLAIN, *configs], comparison, setup, FakeEngines())


def test_configurations_answer_cold_and_warm_in_an_order_that_rotates(tmp_path):
    engines = engines_of(dict.fromkeys("abc", CONFIG), tmp_path)
    group = Group("g", {}, [0.0], [4], ("cold", "warm"), {4: 12})
    (cell,) = group.cells({"s": [0, 1]})
    assert cell.batches == [(0, 1, 0, 1)] * 3
    for part in range(3):
        engines.answer(cell, part, turn=1)
    turns = [1, 2, 3, 0, 2, 3, 0, 1, 3, 0, 1, 2]
    assert [asked[0] for asked in engines.engines.asked] == [i for i in turns for _ in "cw"]
    assert [warm for _, warm, _ in engines.engines.asked] == [False, True] * 12
    rows = engines.rows([cell])
    assert [row["speedup"] for row in rows] == pytest.approx([1, 8 / 7, 8 / 6, 8 / 5] * 2)
    assert [row["cache"] for row in rows] == ["cold"] * 4 + ["warm"] * 4
    assert rows[7]["first_token"] == pytest.approx(5 / 8) and rows[7][
        "speedup_low"
    ] == pytest.approx(8 / 5)
    table = Table(tmp_path / "workloads.csv")
    assert not table.has(**cell.key)
    table.add(rows)
    assert Table(table.path).has(**cell.key) and not table.has(**{**cell.key, "temperature": 1.0})


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """A function that measures all groups of the real model and gives the rows and faults."""
    opened = []

    def started(chosen, configs, prompts, **_):
        opened.append(engines_of(configs, tmp_path))
        return _Entered(opened[-1])

    monkeypatch.setattr(sweep, "started", started)

    def run():
        table = Table(tmp_path / "real_model.csv")
        groups = real_model.groups({"model": "small"}, [5, 10], [0.0, 0.5])
        faults = sweep.fill(table, groups, argparse.Namespace(), "wxyz", SETS)
        return table.rows, faults

    return run


class _Entered:
    def __init__(self, value):
        self.value = value

    def __enter__(self):
        return self.value

    def __exit__(self, *exception):
        pass


def test_every_cell_has_a_row_of_each_configuration(measure, tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "levels", list)
    rows, faults = measure()
    assert faults == []
    cells = {(row["group"], row["set"], row["temperature"]) for row in rows}
    assert len(cells) == 3 * 2 + 2 * 1 - 2 * 1
    first = [row for row in rows if row["set"] == "a" and row["temperature"] == "0.0000"][:2]
    assert [row["speedup"] for row in first] == ["1.0000", "1.1429"]
    assert [row["greedy_differences"] for row in first] == ["0", "0"]
    assert "| standard 5 | 1.14 |" in "\n".join(sweep.means(rows, "speedup", "temperature"))
    plot.lines(rows, tmp_path / "f.png", x="temperature", measures={"speedup": "s"}, panel="group")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_goes_on_where_it_was_stopped(measure, monkeypatch):
    monkeypatch.setattr(FakeEngines, "breaks_at", [4])
    with pytest.raises(KeyboardInterrupt):
        measure()
    monkeypatch.setattr(FakeEngines, "breaks_at", [1])
    with pytest.raises(KeyboardInterrupt):  # set "a" again, at another temperature
        measure()
    monkeypatch.setattr(FakeEngines, "breaks_at", None)
    rows, _ = measure()
    keys = [(row["group"], row["set"], row["temperature"], row["configuration"]) for row in rows]
    assert len(keys) == len(set(keys))


def test_groups_are_sources_lengths_with_both_verifiers_and_drawn_lookups(monkeypatch):
    monkeypatch.setattr(real_model, "levels", lambda: [real_model.SUFFIX])
    found = real_model.groups({"model": "small"}, [5, 10], [0.0, 0.3, 1.0])
    stopping = "block 10, entropy-based stopping"
    assert [(list(group.configs), group.temperatures) for group in found[1:3]] == [
        (["block 5", "block 10", stopping], [0.0]),
        (["standard 5", "block 5", "standard 10", "block 10", stopping], [0.3, 1.0]),
    ]
    assert found[2].configs["standard 10"]["verifier"] == "standard"
    assert found[2].configs[stopping]["levels"] == [{"model": "small", "stopping": "entropy"}]
    assert found[0].name == "sources" and found[0].temperatures == [0.0, 1.0]
    assert found[-1].temperatures == [1.0]
    assert list(found[-1].configs) == ["suffix 8", "ngram_model 8", "suffix+ngram_model 8"]
    assert len(real_model.groups({"ngram": {"max": 4}}, [5], [0.0])[1].configs) == 1


def test_workloads_sum_up_one_source():
    group = workloads.group([1], [0.0])
    assert [config["adaptive"] for config in group.configs.values()] == [False, False, True]
    assert len({str(config["levels"]) for config in group.configs.values()}) == 1
    at = {"set": "a", "batch_size": 16, "temperature": "0.0000", "cache": "warm"}
    speeds = {PLAIN: 1.0, "fixed 8": 1.2, "fixed 3": 1.4, "adaptive": 1.6}
    rows = [
        at | {"configuration": name, "speedup": speed, "first_token": 0.5}
        for name, speed in speeds.items()
    ]
    assert "| 16, 0, warm | 1.20 | 1.40 | 1.60 | 1.60 |" in list(workloads.summary(rows))
    first, second, third = workloads.shortfalls(rows)
    assert "mean 1.600, least 1.60, below 0.98 at 0 of 1 points" in first
    assert "mean 1.143" in second and "median 0.500" in third


def test_phases_of_a_swinging_load_and_what_was_chosen(tmp_path):
    engines = engines_of(adaptive.configurations(), tmp_path)
    rows = adaptive.measure(engines, [1, 4, 1], 2.0, 0.0)
    count = len(engines.names)
    assert [row["x"] for row in rows] == [phase for phase in range(3) for _ in range(count)]
    assert [row["speedup"] for row in rows[:count]] == [1] + [2] * (count - 1)
    assert [row["per_token"] for row in rows[:count]] == [1] + [0.5] * (count - 1)
    assert "draft_length" not in rows[0]
    assert (rows[1]["draft_length"], rows[1]["no_draft"]) == (2, 0.5)
    rows = [dict.fromkeys(COLUMNS, "") | row for row in rows]
    shown = {"speedup": "s", "draft_length": "d"}
    plot.lines(rows, tmp_path / "adaptive.png", x="x", measures=shown)
    fixed, *others = adaptive.configurations().values()
    assert not fixed["adaptive"] and all(config["adaptive"] for config in others)


class FakeEngine:
    """Every step gives every request two tokens, until it has six."""

    def __init__(self):
        self.running, self.prompts, self.aborted, self.given = {}, [], [], 0

    def add_request(self, name, prompt, params):
        self.running[name] = 0
        self.prompts.append(prompt["prompt_token_ids"])

    def step(self):
        found = []
        for name in list(self.running):
            self.running[name] += 2
            self.given += 2
            ended = self.running[name] == 6
            output = SimpleNamespace(token_ids=[1, 2])
            found.append(SimpleNamespace(request_id=name, outputs=[output], finished=ended))
            if ended:
                del self.running[name]
        return found

    def abort_request(self, names):
        self.aborted = names
        self.running.clear()

    def has_unfinished_requests(self):
        return bool(self.running)


def test_as_a_request_ends_the_next_one_starts(monkeypatch):
    engine, clock = FakeEngine(), iter(range(1000))
    monkeypatch.setattr(streams.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr("vllm_hsd.engine.vllm_params", lambda llm, params: params)
    llm = SimpleNamespace(llm_engine=engine)
    served = streams.keep_streams(llm, [[1], [2], [3]], 2, 21.0, {})
    assert engine.prompts[:4] == [[1], [2], [3], [1]]
    assert len(engine.aborted) == 2 and not engine.running
    assert served.num_tokens == engine.given
    assert served.seconds >= 21.0
    # Of the two that were aborted before their first token nothing is known.
    known = len(engine.prompts) - 2
    assert len(served.first_token_seconds) == len(served.per_token) == known
    assert min(served.per_token) > 0 and served.levels == []


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
    demo.print_tables(rows)
    assert "1.14 (1.14-1.14)" in capsys.readouterr().out
    path = tmp_path / "demo.png"
    plot.bars(rows, path, x="set", panel="temperature", measure="speedup")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_one_round_of_the_demo_is_whole_when_the_time_is_over(tmp_path):
    engines = engines_of({"lookup": CONFIG}, tmp_path, prompts=6)
    cells = demo.measure(engines, ["a", "b"], 3, time.monotonic())
    assert [len(found) for cell in cells for found in cell.found.values()] == [1] * 8


def test_the_demo_has_six_prompts_of_each_of_six_kinds():
    prompts = demo.read_demo_prompts()
    assert [len(set(texts)) for texts in prompts.values()] == [6] * 6


def test_counts_of_a_cascade_are_redundancy_and_utilization():
    levels = [{"drafted": 8, "accepted": 6}, {"drafted": 10, "accepted": 5}]
    run = Generation([[1] * 8], ["t"], 1.0, 1.0, [0.1], [1.0], [4], 10, 5, levels)
    found = sweep.counts([run, run])
    assert found["block_efficiency"] == 2 and found["block_efficiency_sd"] == 0
    # 8 tokens of the lower level, 4 of the upper one's own, 5 of which stay.
    assert found["redundancy"] == pytest.approx(1 - 5 / 12)
    assert found["target_utilization"] == 0.5 and found["generated_per_target_call"] == 3


def test_committed_tables_have_one_schema():
    """All but that of `vllm-hsd bench`, whose columns are the command's."""
    for path in sorted(STUDIES.glob("*.csv")):
        if path.stem == "demo_cascade":
            continue
        with path.open() as file:
            assert next(csv.reader(file)) == [*COLUMNS, "commit", "machine"], path


def test_a_line_without_a_second_place_is_a_point_of_its_own(tmp_path):
    rows = [{"configuration": name, "x": 8, "y": 1.0, "e": 0.1} for name in "ab"]
    plot.lines(rows, tmp_path / "p.png", x="x", measures={"y": "y"}, error="e")
    assert (tmp_path / "p.png").is_file()


def test_fixed_drafts_are_the_default():
    config = configs.fixed({"ngram": {"max": 4}}, length=3, verifier="standard")
    assert config["adaptive"] is False and config["num_speculative_tokens"] == 3
    assert config["verifier"] == "standard"
    assert Cell("g", "s", [(1, 2)], 0.5).key["batch_size"] == 2
