"""One item of the proof on a GPU as a test; `prove` runs it."""

import importlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from support import triton_cpu

from benchmarks.gpu.items import ITEMS, Setting


@pytest.mark.parametrize("name", [item.name for item in ITEMS if not item.tests])
def test_item(name, record_property):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        triton_cpu.install()
    given = os.environ["HSD_PROOF_OUTPUT"], os.environ["HSD_PROOF_ENDS"]
    origin = json.loads(os.environ.get("HSD_PROOF_ORIGIN", "{}"))
    arguments = json.loads(os.environ.get("HSD_PROOF_ENGINE_ARGS") or "{}")
    setting = Setting(device, Path(given[0]), name, origin, float(given[1]), arguments)
    # Of step_times, too, with a larger target.
    module, run = ("step_times", "run_32b") if name == "step_times_32b" else (name, "run")
    found = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), run)(setting)
    record_property("finding", json.dumps(asdict(found)))
