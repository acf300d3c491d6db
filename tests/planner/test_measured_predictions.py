"""The benchmarks that compare predictions with engines: turns, errors, tables; without engines."""

import csv
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.planner import cascade_points, check_predictions
from vllm_hsd.planner.predict import Prediction, Selection

CASCADES = [Selection((0,), (3,)), Selection((0, 1), (2, 5))]


class FakeTiming:
    """Steps of 4 ms and 1 ms of drafting, of two tokens with a cascade and one without."""

    def __init__(self):
        self.task = SimpleNamespace(batch_sizes=[2], text_tokens=6)
        self.asked = []

    def engine(self, speculative):
        return nullcontext("speculating" if speculative else "plain")

    def plain_settings(self, number):
        return [{"levels": [], "draft_lengths": [], "batch": 2, "first_prompt": number}]

    def run(self, engine, settings):
        self.asked += [(engine, each) for each in settings]
        step = {"ms": 4.0, "drafting_ms": float(engine == "speculating"), "batch": 2}
        return [{"steps": [dict(step)] * 3, "emitted": 12} for _ in settings]


def test_cascades_and_no_speculation_continue_the_same_prompts_in_turn():
    timing = FakeTiming()
    passes = [{"pass": number} for number in range(10)]
    groups, timed = check_predictions.run_for_real(CASCADES, timing, 5, passes)
    assert [len(group) for group in groups] == [5, 5, 2]  # no speculation at every fourth
    assert [len(each) for each in timed] == [10, 5]
    runs = [setting for _, setting in timing.asked if setting.get("tokens") == 6]
    assert [run["first_prompt"] for run in runs if run["levels"] == [0, 1]] == [0, 2, 4, 6, 8]
    assert {tuple(run["draft_lengths"]) for run in runs} == {(3,), (2, 5), ()}
    ms, error, tokens = check_predictions.summary(groups[0], 2)
    assert (ms, error, tokens) == (pytest.approx(2 * 15 / 12), 0, 2)
    assert groups[2][0]["emitted"] == 6
    assert np.allclose(cascade_points.deviations(groups[0]), 0)


def test_predictions_are_written_with_what_was_measured(tmp_path):
    predicted = [Prediction(ms, 2.0, 2 * ms, (ms,), (1.0,)) for ms in (2.0, 4.0)]
    real = [(2.5, 0.1, 2.0), (4.0, 0.2, 2.1)]
    check_predictions.write(tmp_path, ["a", "b"], predicted, predicted, real, "title")
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["difference"] for row in rows] == ["-0.2000", "+0.0000"]
    assert (tmp_path / "predictions.png").read_bytes().startswith(b"\x89PNG")
