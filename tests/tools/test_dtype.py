"""The dtype of engines on a CPU: probed, explained, remembered."""

import contextlib
import json
import signal
from unittest import mock

import pytest
from support.damage import change_config, damaged_copy

from vllm_hsd.errors import UserError
from vllm_hsd.tools import dtype


@pytest.fixture
def probe(monkeypatch, tmp_path, family):
    """A function of (bfloat16, float32) seconds of a pass, None for a crash, the signal that has
    ended a process, and the model -> the choice.

    It counts the engines that started.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(
        fast: float | None, exact: float | None, ended_by: int = signal.SIGILL, model: str = ""
    ) -> dtype.Choice:
        seconds = {"bfloat16": fast, "float32": exact}

        @contextlib.contextmanager
        def engine(arguments, name):
            run.started += 1
            taken = seconds[arguments["dtype"]]
            crash = None if taken else UserError("the probe ended early with signal SIGILL.")
            work = mock.Mock(side_effect=crash)
            answers = {"wait": work, "generate": work, "ended_by": lambda n: n == ended_by}
            yield mock.Mock(**answers, call=lambda function, tokens: taken)

        monkeypatch.setattr(dtype, "EngineProcess", engine)
        return dtype.choose_dtype(model or family.target)

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


@pytest.mark.parametrize(
    ("ended_by", "why"), [(signal.SIGKILL, "memory is short"), (0, "does not run on this CPU")]
)
def test_a_probe_that_the_processor_has_not_ended_is_made_again(probe, ended_by, why):
    choice = probe(None, 2.0, ended_by)
    assert choice.dtype == "float32" and why in choice.reason
    assert probe(1.0, 2.0).dtype == "bfloat16" and probe.started == 4


@pytest.mark.parametrize(
    ("method", "chosen"),
    [
        ("gptq", "bfloat16"),
        ("fp8", "bfloat16"),
        ("modelopt", "bfloat16"),
        ("AUTO-ROUND", "bfloat16"),
        ("torchao", None),
    ],
)
def test_weights_that_vllm_serves_in_16_bits_alone_are_not_probed(
    probe, method, chosen, family, tmp_path
):
    quantized = change_config(quantization_config={"quant_method": method})
    model = damaged_copy(family.target, tmp_path / "quantized", quantized)
    assert probe(2.0, 1.0, model=model).dtype == (chosen or "float32")
    assert probe.started == (0 if chosen else 2)
