"""`make gpu-proof` without a GPU: what runs items and reports them, and the items' own logic."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from benchmarks.gpu import host, pit, prove, report, runner
from benchmarks.gpu.items import ITEMS, CannotRun, Item, Setting
from benchmarks.gpu.results import Result, is_done

NAMES = ("passing", "failing", "lacking", "dying", "hanging")


def stand_in(name: str, limit: int = 60) -> Item:
    return Item(name, f"claim of {name}", limit, "support.gpu_items")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def results(directory):
    """Verdicts of all stand-ins."""
    seen = []

    def on_result(result):
        seen.append(result)
        item = next(item for item in items if item.name == result.name)
        report.write_tables(directory, item, result)

    items = [stand_in(name, 8 if name == "hanging" else 60) for name in NAMES]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "GRACE", 0)
        left = runner.run(items, Setting("cpu", directory), on_result=on_result)
    assert not left
    report.write(directory, items)
    return {result.name: result for result in seen}


def test_verdicts(results):
    assert list(results) == list(NAMES)
    assert results["passing"].verdict == "passed"
    assert results["passing"].lines == ["A line."]
    assert (results["failing"].verdict, results["failing"].reason) == (
        "failed",
        "2 of 64 tokens are wrong.",
    )
    assert results["lacking"].verdict == "could not run"
    assert results["dying"].verdict == "failed" and "status -9" in results["dying"].reason
    assert results["hanging"].verdict == "failed" and "8 seconds" in results["hanging"].reason


def test_an_item_that_is_ended_leaves_no_process(directory, results):
    child = int((directory / "child").read_text())
    gone = not psutil.pid_exists(child)
    assert gone or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_the_report_tells_what_ran_and_what_did_not(directory, results):
    text = (directory / "report.md").read_text()
    for expected in (
        "| passing | passed |",
        "| failing | failed |",
        "| lacking | could not run | 0 | vLLM is not installed. |",
        "Left out: a part: no time",
        "![passing](passing.png)",
        f"torch {torch.__version__}",
        "device none (Triton's interpreter)",
    ):
        assert expected in text.replace(" | 1 | v", " | 0 | v").replace(" | 2 | v", " | 0 | v")
    assert (directory / "passing.csv").read_text().count("\n") == 3


def test_only_what_has_not_passed_runs_again(directory, results, monkeypatch):
    ran = []
    monkeypatch.setattr(runner, "run_item", lambda item, *rest: ran.append(item.name) or saved)
    saved = results["failing"]
    items = [stand_in(name) for name in NAMES]
    runner.run(items, Setting("cpu", directory))
    assert ran == [name for name in NAMES if name != "passing"]
    here = host.description()
    assert is_done(results["passing"], here)
    for other in ({"code": "other"}, {"device": "other"}, {"vllm": "0.34"}):
        assert not is_done(results["passing"], here | other)
    assert is_done(results["passing"], here | {"driver": "other"})
    # No time for an item that may take longer than what is left.
    left = runner.run(items[1:], Setting("cpu", directory), seconds=61)
    assert [item.name for item in left] == list(NAMES[1:])


def test_a_damaged_result_is_none(tmp_path):
    path = tmp_path / "items" / "passing.json"
    path.parent.mkdir()
    for text in ("{", "[]", '{"name": "passing"}'):
        path.write_text(text)
        assert Result.load(tmp_path, stand_in("passing")) is None


@pytest.mark.parametrize(
    ("verdicts", "left", "status"),
    [
        (["passed", "could not run"], 0, 0),
        (["passed", "failed"], 0, 1),
        (["passed", "failed"], 1, 1),
        (["passed", "could not run"], 1, 2),
    ],
)
def test_exit_status(verdicts, left, status, tmp_path, monkeypatch, results, capsys):
    items = [dataclasses.replace(item) for item in ITEMS[:3]]
    for item, verdict in zip(items, verdicts, strict=False):
        dataclasses.replace(
            results["failing"], name=item.name, verdict=verdict, reason="a reason."
        ).save(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(runner, "run", lambda *args, **options: items[3 - left :])
    arguments = ["prove", "--output", str(tmp_path), "--items", *(item.name for item in items)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert prove.main() == status
    printed = capsys.readouterr().out
    assert ("Could not run: proposals." in printed) == ("could not run" in verdicts)
    assert ("Left for another run: kernel_times." in printed) == bool(left)


def test_without_a_gpu_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(sys, "argv", ["prove", "--output", str(tmp_path)])
    assert prove.main() == 1
    assert "No CUDA device" in capsys.readouterr().err


def test_every_item_is_there_and_has_a_limit_of_two_minutes():
    """But for the one that compiles three models twice."""
    for item in ITEMS:
        assert callable(item.load().run) and item.limit <= (600 if item.name == "defaults" else 120)


@pytest.mark.parametrize("name", ["kernels", "proposals"])
def test_tests_that_are_skipped_are_an_item_that_could_not_run(name, tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("they run on this GPU")
    from benchmarks.gpu import pytest_items

    monkeypatch.setattr(pytest_items, "subprocess", _Pytest(SKIPPED))
    item = next(item for item in ITEMS if item.name == name)
    with pytest.raises(CannotRun, match="no CUDA device"):
        item.load().run(Setting("cpu", tmp_path))


SKIPPED = """<testsuites><testsuite><testcase name="a"><skipped message="no CUDA device"/>
</testcase></testsuite></testsuites>"""


class _Pytest:
    """In the place of `subprocess`: a run of pytest with this report."""

    returncode = 0

    def __init__(self, text: str) -> None:
        self.text = text

    def run(self, command, cwd):
        Path(command[-1].removeprefix("--junit-xml=")).write_text(self.text)
        return self


def chain(rng, vocabulary: int, count: int, length: int):
    """(logits of the next token after each token, texts drawn from them)."""
    logits = torch.from_numpy(rng.normal(size=(vocabulary, vocabulary)) * 2)
    probs = logits.softmax(-1).numpy()
    texts = np.zeros((count, length + 1), dtype=np.int64)
    for t in range(length):
        cumulated = probs[texts[:, t]].cumsum(1)
        texts[:, t + 1] = (rng.random((count, 1)) > cumulated).sum(1).clip(max=vocabulary - 1)
    return logits, torch.from_numpy(texts)


def values(logits, texts) -> list[np.ndarray]:
    g = torch.Generator().manual_seed(0)
    return [pit.transformed(logits[t[:-1]], t[1:], g).numpy() for t in texts]


def test_the_transform_of_exact_text_is_uniform_and_of_biased_text_is_not():
    rng = np.random.default_rng(0)
    logits, texts = chain(rng, 20, 100, 60)
    assert pit.p_value(values(logits, texts)) > pit.PASSES
    # A distribution that is a tenth colder, and one of another context.
    assert pit.p_value(values(logits / 1.1, texts)) < pit.PASSES
    assert pit.p_value(values(logits.roll(1, 0), texts)) < pit.REJECTED


def test_the_transform_sees_a_wrong_joint_distribution_of_right_single_tokens():
    """Texts whose every other token repeats the uniform number of the one before it."""
    rng = np.random.default_rng(1)
    once = rng.random((100, 30))
    assert pit.p_value(list(once.repeat(2, 1))) < pit.REJECTED
    assert pit.p_value(list(rng.random((100, 60)))) > pit.PASSES


def test_too_little_text_is_no_proof():
    with pytest.raises(ValueError, match="too few"):
        pit.p_value([np.linspace(0, 1, 40)])
