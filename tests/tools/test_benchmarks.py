"""The Makefile reaches every benchmark, and the helpers that benchmarks share."""

import csv
import re
from pathlib import Path

from benchmarks import common

ROOT = Path(__file__).parents[2]


def test_make_bench_runs_every_benchmark():
    makefile = (ROOT / "Makefile").read_text()
    scripts = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for path in (ROOT / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text() and "models" not in path.parts
    }
    run = set(re.findall(r"-m (benchmarks[\w.]+)", makefile))
    assert scripts == {module for module in run if not module.startswith("benchmarks.models.")}


def test_every_row_of_a_csv_names_the_commit_and_the_machine(tmp_path):
    common.write_csv(tmp_path / "new" / "rows.csv", [{"x": 1, "rate": 0.5}, {"x": 2, "rate": 1.0}])
    with (tmp_path / "new" / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["rate"] for row in rows] == ["0.5000", "1.0000"]
    assert all(row["commit"] and "1 thread" in row["machine"] for row in rows)
