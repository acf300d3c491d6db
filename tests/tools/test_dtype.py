"""The dtype of engines on a CPU: probed, explained, remembered."""

import json
from typing import Any

import pytest

from vllm_hsd.errors import UserError
from vllm_hsd.tools import dtype


class FakeEngine:
    """An engine that takes `seconds[dtype]` per pass, or breaks."""

    started = 0

    def __init__(self, seconds: dict[str, float | None], arguments: dict[str, Any]) -> None:
        self.seconds = seconds[arguments["dtype"]]

    def __enter__(self) -> "FakeEngine":
        FakeEngine.started += 1
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def wait(self) -> None:
        if self.seconds is None:
            raise UserError("the probe ended early with signal SIGILL.")

    def generate(self, prompts: list, params: dict) -> None:
        self.wait()

    def call(self, function: Any, tokens: int) -> float | None:
        return self.seconds


@pytest.fixture
def probe(monkeypatch, tmp_path, family):
    """A function of (bfloat16, float32) seconds, None for a crash -> the choice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(FakeEngine, "started", 0)

    def run(fast: float | None, exact: float | None) -> dtype.Choice:
        seconds = {"bfloat16": fast, "float32": exact}
        monkeypatch.setattr(dtype, "EngineProcess", lambda args, name: FakeEngine(seconds, args))
        return dtype.choose_dtype(family.target)

    return run


def test_bfloat16_where_it_is_faster(probe):
    choice = probe(1.0, 2.0)
    assert choice.dtype == "bfloat16" and "takes 0.50 and 0.50 of a float32 step's" in str(choice)


def test_float32_where_bfloat16_is_an_illegal_instruction(probe):
    choice = probe(None, 2.0)
    assert choice.dtype == "float32" and "signal SIGILL" in choice.reason


def test_an_engine_that_runs_in_no_dtype_is_an_error(probe):
    with pytest.raises(UserError, match="SIGILL"):
        probe(1.0, None)


def test_the_outcome_is_kept_for_the_next_process(probe, tmp_path):
    first = probe(1.0, 2.0)
    assert probe(3.0, 2.0) == first and FakeEngine.started == 2
    (file,) = (tmp_path / "vllm-hsd").iterdir()
    file.write_text("damaged")
    assert probe(3.0, 2.0).dtype == "float32"
    assert json.loads(file.read_text())["dtype"] == "float32"
