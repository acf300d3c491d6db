"""The dtype of engines on a CPU: probed, explained, remembered."""

import contextlib
import json
from unittest import mock

import pytest

from vllm_hsd.errors import UserError
from vllm_hsd.tools import dtype


@pytest.fixture
def probe(monkeypatch, tmp_path, family):
    """A function of (bfloat16, float32) seconds of a pass, None for a crash, and whether the system
    has ended a process -> the choice.

    It counts the engines that started.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(fast: float | None, exact: float | None, killed: bool = False) -> dtype.Choice:
        seconds = {"bfloat16": fast, "float32": exact}

        @contextlib.contextmanager
        def engine(arguments, name):
            run.started += 1
            taken = seconds[arguments["dtype"]]
            crash = None if taken else UserError("the probe ended early with signal SIGILL.")
            work = mock.Mock(side_effect=crash)
            answers = {"wait": work, "generate": work, "killed": killed}
            yield mock.Mock(**answers, call=lambda function, tokens: taken)

        monkeypatch.setattr(dtype, "EngineProcess", engine)
        return dtype.choose_dtype(family.target)

    run.started = 0
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
    assert probe(3.0, 2.0) == first and probe.started == 2
    (file,) = (tmp_path / "vllm-hsd").iterdir()
    file.write_text("damaged")
    assert probe(3.0, 2.0).dtype == "float32"
    assert json.loads(file.read_text())["dtype"] == "float32"


def test_a_probe_that_the_system_has_ended_is_made_again(probe):
    choice = probe(None, 2.0, killed=True)
    assert choice.dtype == "float32" and "memory is short" in choice.reason
    assert probe(1.0, 2.0).dtype == "bfloat16" and probe.started == 4
