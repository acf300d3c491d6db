"""The benchmark over kinds of text, batch sizes and prefix caches; without engines."""

from benchmarks.cells import Table
from benchmarks.end_to_end import workloads
from vllm_hsd.engine import Generation

NAMES = list(workloads.configurations())


class FakeEngines:
    """Engines that are faster the later they stand, and twice as fast with a warm cache."""

    def __init__(self):
        self.asked = []

    def get(self, index):
        self.index = index
        return self

    def call(self, function):
        assert function is workloads.empty_prefix_cache
        self.warm = False

    def generate(self, prompts, params):
        self.asked.append((self.index, self.warm, len(prompts)))
        seconds = (8 - self.index) / (1 + self.warm)
        self.warm = True
        ids = [[1] * params["max_tokens"]] * len(prompts)
        return Generation(ids, [""] * len(prompts), seconds, seconds, [seconds / 4], [], [])


def test_every_configuration_answers_cold_and_warm_in_an_order_that_rotates():
    engines = FakeEngines()
    found = workloads.measure_cell(engines, NAMES, [[1], [2]], 4, {"max_tokens": 3}, turn=1)
    turns = [1, 2, 3, 0, 2, 3, 0, 1, 3, 0, 1, 2]
    assert [asked[0] for asked in engines.asked] == [i for i in turns for _ in workloads.CACHES]
    assert {count for _, _, count in engines.asked} == {4}
    assert [warm for _, warm, _ in engines.asked] == [False, True] * 12
    rows = workloads.cell_rows(found, {"set": "a", "batch_size": 16, "temperature": 0.0})
    assert [row["over_no_speculation"] for row in rows] == [1, 8 / 7, 8 / 6, 8 / 5] * 2
    assert rows[7]["first_token_over_no_speculation"] == 5 / 8


def test_cells_are_kept_and_summed_up(tmp_path):
    cell = {"set": "a", "batch_size": 16, "temperature": 0.0}
    found = workloads.measure_cell(FakeEngines(), NAMES, [[1], [2]], 16, {"max_tokens": 3}, turn=0)
    table = Table(tmp_path / "workloads.csv")
    assert not table.has(**cell)
    table.add(workloads.cell_rows(found, cell))
    assert Table(table.path).has(**cell) and not table.has(**{**cell, "temperature": 1.0})
    assert "| 16, 0, warm | 1.14 | 1.33 | 1.60 | 1.60 |" in list(workloads.summary(table.rows))
    first, second, third = workloads.shortfalls(table.rows)
    assert "mean 1.600, least 1.60, below 0.98 at 0 of 2 points" in first
    assert "mean 1.200" in second
    assert "median 0.625, most 0.62, above 1.03 at 0 of 2 points" in third


def test_configurations_have_one_source():
    first, *others = workloads.configurations().values()
    assert first is None
    assert len({str(config["levels"]) for config in others}) == 1
    assert [config["adaptive"] for config in others] == [False, False, True]
