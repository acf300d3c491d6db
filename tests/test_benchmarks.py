"""The runner of all benchmarks: its list, and what it says about each outcome."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def run_all(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("run_all", BENCHMARKS / "run_all.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    monkeypatch.setitem(sys.modules, "run_all", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["run_all.py"])
    return module


def test_every_benchmark_is_on_the_list(run_all):
    scripts = {
        path.relative_to(BENCHMARKS).as_posix()
        for path in BENCHMARKS.rglob("*.py")
        if '__name__ == "__main__"' in path.read_text() and path.parent.name != "models"
    }
    listed = {b.script for b in run_all.ALL if b.script.endswith(".py")}
    assert listed == scripts - {"run_all.py"}


def test_outcomes_are_told_apart(run_all, monkeypatch, capsys, tmp_path):
    for name, body in {"good": "print('hello')", "bad": "raise SystemExit(3)"}.items():
        (tmp_path / f"{name}.py").write_text(body)
    benchmarks = [run_all.Benchmark(str(tmp_path / f"{name}.py")) for name in ("good", "bad")]
    monkeypatch.setattr(run_all.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        run_all, "ALL", (*benchmarks, run_all.Benchmark("kernels/none.py", needs_gpu=True))
    )
    monkeypatch.setattr(run_all.Benchmark, "name", property(lambda b: Path(b.script).stem))
    with pytest.raises(SystemExit) as stop:
        run_all.main()
    assert stop.value.code == 1
    printed = capsys.readouterr().out
    assert "good: ran in" in printed
    assert "bad: FAILED with status 3" in printed
    assert "none: not run: needs a GPU" in printed
    assert (tmp_path / "logs" / "good.log").read_text() == "hello\n"


def test_all_is_well_without_a_gpu(run_all, monkeypatch):
    monkeypatch.setattr(run_all.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(run_all, "ALL", (run_all.Benchmark("kernels/none.py", needs_gpu=True),))
    with pytest.raises(SystemExit) as stop:
        run_all.main()
    assert not stop.value.code
