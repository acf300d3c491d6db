"""Items in the place of those of `benchmarks.gpu`, for the tests of what runs them."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

WAITING = ["b", "a"]
ROWS = [{"x": 1, "ms": 0.25}, {"x": 2, "ms": 0.5}]


def test_passing(record_property):
    found = {"lines": ["A line."], "rows": ROWS, "left_out": ["a part: no time"]}
    record_property("finding", json.dumps(found))


def test_waiting(record_property):
    """A part of it in every run."""
    parts = Path(os.environ["HSD_PROOF_OUTPUT"], "waits")
    left = int(parts.read_text()) - 1 if parts.exists() else len(WAITING)
    parts.write_text(str(left))
    found = {"lines": [], "rows": [], "left_out": [], "waiting": WAITING[len(WAITING) - left :]}
    record_property("finding", json.dumps(found))


def test_failing():
    pytest.fail("2 of 64 tokens are wrong.")


def test_lacking():
    pytest.skip("vLLM is not installed.")


def test_dying():
    os.kill(os.getpid(), signal.SIGKILL)


def test_hanging():
    child = subprocess.Popen(["sleep", "600"])
    Path(os.environ["HSD_PROOF_OUTPUT"], "child").write_text(str(child.pid))
    time.sleep(600)
