"""Interpreter tests run in a child process of their own.

Triton decides at import whether a kernel is interpreted, and the rest of the suite imports it
compiled. So tests marked ``interpret`` are run once by a child pytest with TRITON_INTERPRET=1 and
report what it reported; where the variable is set already, they run in place.
"""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Not by way of the folder tests/: its `kernels` is hidden by the repository's.
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks" / "kernels")]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
REPORT = "KERNEL_TEST_REPORT"
CHILD_REPORTS = pytest.StashKey[dict]()

if INTERPRETED:
    from vllm_hsd.kernels.interpreter import repair

    repair()
    warnings.filterwarnings("ignore", category=RuntimeWarning)


def _is_interpreted(item: pytest.Item) -> bool:
    return item.path.is_relative_to(HERE) and item.get_closest_marker("interpret") is not None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if _is_interpreted(item) and not INTERPRETED:
            # The first of them waits for the whole child.
            item.add_marker(pytest.mark.timeout(3600))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if INTERPRETED or not _is_interpreted(pyfuncitem):
        return None
    stash = pyfuncitem.config.stash
    if CHILD_REPORTS not in stash:
        stash[CHILD_REPORTS] = _run_child(pyfuncitem.session)
    outcome, text = stash[CHILD_REPORTS].get(pyfuncitem.nodeid, ("failed", "not run by the child"))
    if outcome == "skipped":
        pytest.skip(text)
    if outcome == "failed":
        pytest.fail(text, pytrace=False)
    return True


def _run_child(session: pytest.Session) -> dict[str, tuple[str, str]]:
    nodes = [item.nodeid for item in session.items if _is_interpreted(item)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        environment = os.environ | {
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            REPORT: str(report),
        }
        child = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *nodes],
            cwd=session.config.rootpath,
            env=environment,
            capture_output=True,
            text=True,
        )
        if not report.exists():
            pytest.fail(f"the child pytest did not start:\n{child.stdout}\n{child.stderr}")
        lines = report.read_text().splitlines()
    return {node: (outcome, text) for node, outcome, text in map(json.loads, lines)}


def pytest_runtest_logreport(report):
    if REPORT in os.environ and (report.when == "call" or report.outcome != "passed"):
        text = report.longreprtext
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            text = report.longrepr[2]
        with open(os.environ[REPORT], "a") as file:
            print(json.dumps([report.nodeid, report.outcome, text]), file=file)
