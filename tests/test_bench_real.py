"""The benchmark of the papers' tables on a real model: groups, cells, resuming; without engines."""

import pytest

from benchmarks.paper_tables import real_model
from vllm_hsd.cli.bench_jobs import Comparison, Setup
from vllm_hsd.engine import Generation

SETUP = Setup([None] * 9, [[1], [2], [3], [4]], True, 1000, "float32", "cpu", 1, 1 << 40)
SETS = {"a": [0, 1], "b": [2, 3]}


class FakeEngines:
    """Engines of which the fastest one breaks when it is asked for the prompt `breaks_at`."""

    breaks_at = None

    def __init__(self, comparison, setup):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def get(self, index):
        self.index = index
        return self

    def generate(self, prompts, params):
        if prompts[0] == self.breaks_at:
            raise KeyboardInterrupt
        seconds = 4.0 / (1 + self.index)
        return Generation([[7] * 5], ["text"], seconds, seconds, [0.1], [1.0], [5 - self.index])


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """A function that measures all groups and gives the rows of the file."""
    monkeypatch.setattr(real_model, "Engines", FakeEngines)
    monkeypatch.setattr(real_model.bench, "inspect", lambda comparison: SETUP)
    base = Comparison("m", [None], list("wxyz"), [1], [0.0], 5, 4, 1, {}, tmp_path)

    def run():
        table = real_model.Table(tmp_path / "real_model.csv")
        for group in real_model.groups({"model": "small"}, [5, 10], [0.0, 0.5]):
            assert real_model.measure_group(base, group, SETS, table) == []
        return table.rows

    return run


def test_groups_are_the_sources_and_lengths_with_both_verifiers_and_stopping(monkeypatch):
    monkeypatch.setattr(real_model, "levels", list)
    found = real_model.groups({"model": "small"}, [5, 10], [0.0, 0.3, 1.0])
    stopping = "block 10, entropy-based stopping"
    assert [(list(group.configs), group.temperatures) for group in found[1:]] == [
        (["block 5", "block 10", stopping], [0.0]),
        (["standard 5", "block 5", "standard 10", "block 10", stopping], [0.3, 1.0]),
    ]
    assert found[2].configs["standard 10"]["verifier"] == "standard"
    assert found[2].configs[stopping]["levels"] == [{"model": "small", "stopping": "entropy"}]
    assert found[0].name == "sources" and found[0].temperatures == [0.0, 1.0]
    # A lookup has no distribution of which an entropy could be taken.
    assert len(real_model.groups({"ngram": {"max": 4}}, [5], [0.0])[1].configs) == 1


def test_a_store_is_also_drawn_from_at_temperatures_above_zero(monkeypatch):
    monkeypatch.setattr(real_model, "levels", lambda: [real_model.SUFFIX])
    drawn = real_model.groups({"model": "small"}, [5], [0.0, 0.3, 1.0])[-1]
    assert drawn.temperatures == [1.0]
    assert list(drawn.configs) == ["suffix 8", "ngram_model 8", "suffix+ngram_model 8"]


def test_every_cell_has_a_row_of_each_configuration(measure, tmp_path):
    rows = measure()
    cells = {(row["group"], row["set"], row["temperature"]) for row in rows}
    assert len(cells) == 2 * 2 + 2 * 1
    first = [row for row in rows if row["set"] == "a" and row["temperature"] == "0.0000"][:3]
    assert [row["speedup"] for row in first] == ["1.0000", "2.0000", "3.0000"]
    assert [row["speedup_quarter3"] for row in first] == ["1.0000", "2.0000", "3.0000"]
    assert [row["greedy_differences"] for row in first] == ["0", "0", "0"]
    text = "\n".join(real_model.means(rows))
    assert "| standard 5 | 2.00 |" in text
    real_model.plot(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


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
