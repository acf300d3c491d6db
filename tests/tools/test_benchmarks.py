"""The Makefile reaches every benchmark, and the helpers that benchmarks share."""

import csv
import re

import torch

from benchmarks.common import REPOSITORY, write_csv
from benchmarks.kernels import cpu_matmul_rows


def test_make_bench_runs_every_benchmark():
    makefile = (REPOSITORY / "Makefile").read_text()
    scripts = {
        path.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".")
        for path in (REPOSITORY / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text() and "models" not in path.parts
    }
    run = set(re.findall(r"-m (benchmarks[\w.]+)", makefile))
    assert scripts == {module for module in run if not module.startswith("benchmarks.models.")}


def test_every_row_of_a_csv_names_the_commit_and_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    write_csv(tmp_path / "new" / "rows.csv", [{"x": 1, "rate": 0.5}, {"x": 2, "rate": 1.0}])
    with (tmp_path / "new" / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["rate"] for row in rows] == ["0.5000", "1.0000"]
    assert all(row["commit"] and "1 thread" in row["machine"] for row in rows)


def test_a_product_that_a_cpu_does_not_have_is_left_out(tmp_path, monkeypatch, capsys):
    def seconds(shape, dtype, rounds):
        if dtype == torch.bfloat16:
            raise RuntimeError("could not create a primitive descriptor")
        return dict.fromkeys(cpu_matmul_rows.ROWS, 0.002)

    monkeypatch.setattr(cpu_matmul_rows, "seconds_by_rows", seconds)
    monkeypatch.setattr("sys.argv", ["cpu_matmul_rows", "--output", str(tmp_path)])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    cpu_matmul_rows.main()
    assert capsys.readouterr().out.startswith("bfloat16 is left out: oneDNN has no product of it")
    with (tmp_path / "cpu_matmul_rows.csv").open() as file:
        assert {row["dtype"] for row in csv.DictReader(file)} == {"float32"}
