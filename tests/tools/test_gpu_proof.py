"""`make gpu-proof` without a GPU: what runs items and reports them, and the items' own logic."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from support import proof_items
from support.marks import slow

from benchmarks.common import REPOSITORY
from benchmarks.gpu import host, prove
from benchmarks.gpu.items import ITEMS, TOY, Item, Setting

NAMES = ("passing", "failing", "lacking", "dying", "hanging", "waiting")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def items(directory) -> list[Item]:
    """Stand-ins, where no conftest.py of this repository takes time to import."""
    file = shutil.copy(proof_items.__file__, directory)
    figure = {"x": "x", "measures": {"ms": "ms"}, "line": "x"}
    limits = dict.fromkeys(NAMES, 300) | {"hanging": 8}
    return [Item(n, f"claim of {n}", limits[n], f"{file}::test_{n}", figure) for n in NAMES]


@pytest.fixture(scope="module")
def results(directory, items):
    """Results of all stand-ins."""
    seen, parts = {}, []

    def on_result(item, result):
        if item.name == "waiting":
            parts.append(result["waiting"])
        seen[item.name] = result
        prove.write_tables(directory, item, result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prove, "GRACE", 0)
        assert not prove.run(items, directory, at_once=3, on_result=on_result)
    prove.write_report(directory, items)
    # An item of which parts wait is run until none does.
    assert parts == [["b", "a"], ["a"], []]
    return seen


def test_verdicts(results, directory):
    assert set(results) == set(NAMES)
    found = {name: (result["verdict"], result["reason"]) for name, result in results.items()}
    assert found["passing"] == ("passed", "") and results["passing"]["lines"] == ["A line."]
    assert found["failing"] == ("failed", "2 of 64 tokens are wrong.")
    assert found["lacking"] == ("could not run", "vLLM is not installed.")
    assert found["dying"][0] == "failed" and "status -9" in found["dying"][1]
    assert found["hanging"][0] == "failed" and "8 seconds" in found["hanging"][1]
    # Its child is killed, too, and there for a moment longer.
    with contextlib.suppress(psutil.NoSuchProcess):
        child, ends = psutil.Process(int((directory / "child").read_text())), time.monotonic() + 30
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < ends
            time.sleep(0.05)


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_proof_that_is_ended_leaves_nothing_running(items, tmp_path, at_once):
    hanging = f"Item('hanging', '', 300, tests={items[NAMES.index('hanging')].node!r})"
    lines = "from benchmarks.gpu import prove", "from benchmarks.gpu.items import Item"
    lines += f"prove.ITEMS = [{hanging}]", "raise SystemExit(prove.main())"
    options = "--output", str(tmp_path), "--at-once", str(at_once)
    command = [sys.executable, "-c", "; ".join(lines), *options]
    proof = subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | {TOY: "1"})
    file, ends = tmp_path / "child", time.monotonic() + 120
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < ends and proof.poll() is None
        time.sleep(0.1)
    child = psutil.Process(int(file.read_text()))
    proof.send_signal(signal.SIGTERM)
    assert proof.wait(60) == 128 + signal.SIGTERM
    with contextlib.suppress(psutil.NoSuchProcess):
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < ends
            time.sleep(0.05)


def test_the_report_tells_what_ran_and_what_did_not(directory, results):
    text = (directory / "report.md").read_text()
    for expected in (
        "| passing | passed |",
        "| failing | failed |",
        "| lacking | could not run |",
        "Left out: a part: no time",
        f"torch {torch.__version__}",
        host.device(),
    ):
        assert expected in text
    assert (directory / "passing.csv").read_text().count("\n") == 3
    assert (directory / "passing.png").read_bytes().startswith(b"\x89PNG")


def test_only_what_has_not_passed_runs_again(directory, items, results, monkeypatch):
    ran = []
    none = {"waiting": []}
    monkeypatch.setattr(prove, "run_item", lambda item, *rest: ran.append(item.name) or none)
    prove.run(items, directory)
    assert ran == [name for name in NAMES if name not in ("passing", "waiting")]
    here = host.description()
    assert prove.is_done(results["passing"], here)
    assert not prove.is_done(results["passing"] | {"waiting": ["a"]}, here)
    for other in ({"code": "other"}, {"device": "other"}, {"vllm": "0.34"}):
        assert not prove.is_done(results["passing"], here | other)
    assert prove.is_done(results["passing"], here | {"driver": "other"})
    # No time for an item that may take longer than what is left.
    left = prove.run(items[1:4], directory, seconds=61)
    assert [item.name for item in left] == list(NAMES[1:4])
    (directory / "items" / "passing.json").write_text('{"name": "passing"}')
    assert prove.load(directory, items[0]) is None


def test_without_a_gpu_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv(TOY, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["prove", "--output", str(tmp_path)])
    assert prove.main() == 1
    assert "No CUDA device" in capsys.readouterr().err


def test_every_item_fits_a_command_twice_and_one_of_the_page():
    """A command takes ten minutes; and no part of an item takes longer than the item."""
    from benchmarks.gpu import defaults, engine_distribution, items, kernel_times, step_times

    page = (REPOSITORY / "docs" / "gpu-proof.md").read_text()
    limits = [540 / 2, *(int(seconds) for seconds in re.findall(r"--seconds (\d+)", page))]
    assert len(limits) > 1 and all(i.limit + prove.GRACE <= min(limits) for i in ITEMS)
    parts = 2 * items.PART_SECONDS, kernel_times.RESERVE
    parts += tuple(module.SECONDS for module in (defaults, engine_distribution, step_times))
    assert all(seconds < item.limit for seconds in parts for item in ITEMS)


def test_a_part_is_run_once_for_one_host_and_code(tmp_path):
    def find(value, origin="a", ends=float("inf")):
        setting = Setting("cpu", tmp_path, "item", {"code": origin}, ends)
        return setting.part("n-gram 3 / 4", lambda: {"value": value}, seconds=60)

    assert find(1, ends=time.time() + 30) is None
    assert find(2) == find(3) == find(4, ends=0) == {"value": 2}
    assert find(5, "b") == {"value": 5}


# Imports of them raise ModuleNotFoundError.
BLOCKED = """
import sys
sys.modules.update(dict.fromkeys(("vllm", "pydantic", "pydantic_core")))
"""


def run_without_vllm(directory, *command: str, **environment: str) -> None:
    """A module in a process that finds neither vLLM nor pydantic, nor git."""
    (directory / "sitecustomize.py").write_text(BLOCKED)
    path = os.pathsep.join([str(directory), str(REPOSITORY)])
    environment = os.environ | {"PYTHONPATH": path, "PATH": str(directory)} | environment
    command = (sys.executable, "-m", *command)
    found = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


WITHOUT_VLLM = [item for item in ITEMS if not item.needs_vllm]
ALL = [item.name for item in WITHOUT_VLLM]


def test_items_that_promise_it_start_without_vllm(tmp_path):
    assert len(WITHOUT_VLLM) == 4
    nodes = (item.node for item in WITHOUT_VLLM)
    run_without_vllm(tmp_path, "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *nodes)


@pytest.mark.parametrize("names", slow(["kernel_times"], ALL), ids=["one", "all"])
def test_kernel_items_run_without_vllm_and_git(tmp_path, names):
    for tool in ("gcc", "as", "ld"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    command = "benchmarks.gpu.prove", "--output", str(tmp_path / "gpu"), "--items", *names
    run_without_vllm(tmp_path, *command, TRITON_CPU_FLAGS="-O0", **{TOY: "1"})
    results = {n: json.loads((tmp_path / f"gpu/items/{n}.json").read_text()) for n in names}
    assert {result["verdict"] for result in results.values()} == {"passed"}
    assert results["kernel_times"]["left_out"]
    assert ",unknown," in (tmp_path / "gpu/kernel_times.csv").read_text()
