"""Runs items one after the other, each in a process of its own that is ended at its limit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import host
from benchmarks.gpu.items import CannotRun, CheckFailed, Finding, Item, Setting
from benchmarks.gpu.results import Result, is_done

# Seconds that an item may take longer than it plans for, before it is ended.
GRACE = 30


def run(
    items: Sequence[Item],
    setting: Setting,
    *,
    seconds: float = float("inf"),
    again: bool = False,
    on_result: Callable[[Result], object] = lambda result: None,
) -> list[Item]:
    """Run the items that have not passed on this host with this code.

    Args:
        seconds: no item is started that might not end within them.
        again: run those that have passed, too.
        on_result: called after each of them.

    Returns:
        the items that there was no time for.
    """
    began = time.monotonic()
    here = host.description()
    left = []
    for item in items:
        if not again and is_done(Result.load(setting.output, item), here):
            continue
        if item.limit + GRACE > seconds - (time.monotonic() - began):
            left.append(item)
            continue
        result = run_item(item, setting, here)
        result.save(setting.output)
        on_result(result)
    return left


def run_item(item: Item, setting: Setting, here: dict[str, str]) -> Result:
    """The result of one item, whatever becomes of its process."""
    started, began = time.strftime("%Y-%m-%d %H:%M", time.gmtime()), time.monotonic()
    before = host.clocks()
    outcome = _in_process(item, dataclasses.replace(setting, ends=began + item.limit))
    return Result(
        name=item.name,
        seconds=round(time.monotonic() - began, 1),
        host=here,
        started=started,
        clocks=[before, host.clocks()],
        **outcome,
    )


def _in_process(item: Item, setting: Setting) -> dict[str, Any]:
    log = setting.log(item.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    answer = log.with_suffix(".answer")
    answer.unlink(missing_ok=True)
    process = multiprocessing.get_context("spawn").Process(
        target=_work, args=(item, setting, log, answer)
    )
    process.start()
    try:
        process.join(item.limit + GRACE)
        if process.is_alive():
            return {"verdict": "failed", "reason": f"not done after {item.limit + GRACE} seconds."}
        with contextlib.suppress(OSError, ValueError):
            return json.loads(answer.read_text())
        ended = f"its process ended with status {process.exitcode}"
        return {"verdict": "failed", "reason": f"{ended} (log: {log.name})."}
    finally:
        answer.unlink(missing_ok=True)
        # The item's own children, too: engines outlive a process that is killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def _work(item: Item, setting: Setting, log: Path, answer: Path) -> None:
    """In the item's process: run it and write the verdict to `answer`."""
    os.setsid()
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    outcome: dict[str, Any]
    try:
        finding: Finding = item.load().run(setting)
        outcome = {"verdict": "passed", **dataclasses.asdict(finding)}
    except CannotRun as error:
        outcome = {"verdict": "could not run", "reason": str(error)}
    except (CheckFailed, SystemExit) as error:
        outcome = {"verdict": "failed", "reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        outcome = {"verdict": "failed", "reason": reason}
    sys.stdout.flush()
    unfinished = answer.with_suffix(".part")
    unfinished.write_text(json.dumps(outcome))
    unfinished.replace(answer)
