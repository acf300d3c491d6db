"""Items that are tests."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.common import REPOSITORY
from benchmarks.gpu.items import CannotRun, CheckFailed, Finding, Setting


def run_tests(setting: Setting, *files: str) -> Finding:
    """Run test files of this repository in a process of their own.

    Raises:
        CheckFailed: a test failed, or none was found.
        CannotRun: all of them were skipped.
    """
    found = Path(setting.output, "tests.xml")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    ended = subprocess.run([*command, f"--junit-xml={found}"], cwd=REPOSITORY)
    try:
        cases = list(ElementTree.parse(found).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        raise CheckFailed(
            f"pytest ended with status {ended.returncode}, without a report."
        ) from None
    found.unlink()
    failed = [_name(case) for case in cases if _has(case, "failure") or _has(case, "error")]
    skipped = [case for case in cases if _has(case, "skipped")]
    if failed or not cases:
        shown = ", ".join(failed[:5])
        raise CheckFailed(f"{len(failed)} of {len(cases)} tests failed: {shown}.")
    if len(skipped) == len(cases):
        reasons = {mark.get("message", "") for case in skipped for mark in case.iter("skipped")}
        raise CannotRun(f"all {len(cases)} tests were skipped: {', '.join(sorted(reasons))}.")
    if ended.returncode:
        raise CheckFailed(f"pytest ended with status {ended.returncode}.")
    line = f"{len(cases) - len(skipped)} tests passed in {', '.join(files)}."
    return Finding([line], left_out=[f"test {_name(case)}" for case in skipped])


def _has(case: ElementTree.Element, tag: str) -> bool:
    return case.find(tag) is not None


def _name(case: ElementTree.Element) -> str:
    return case.get("name", "?")
