"""Proof on a GPU: correctness, exactness and times of what was built without one, item by item.

Needs one GPU, torch and Triton, and no network; items that need vLLM say so where it is missing.
What has passed with this code on this device is not run again, so a run that was ended goes on
where it was. `docs/gpu-proof.md` tells how.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import plot
from benchmarks.common import REPOSITORY, RESULTS, commit, options
from benchmarks.gpu import host
from benchmarks.gpu.items import ITEMS, TOY, Item
from vllm_hsd.checked_files import written_whole

# Seconds that an item may take longer than it plans for, before it is ended.
GRACE = 30
# Entries of `host.description` without which a result is another one.
SAME = ("device", "code", "torch", "triton", "vllm", "engine_args")
# What is compiled for one engine serves the next one, also after a run that went on elsewhere.
CACHES = {"TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
# Process groups of the items that are under way.
_RUNNING: set[int] = set()
# "name", "verdict" ("passed", "failed" or "could not run"), "reason", "seconds", "started" (UTC),
# "host", "clocks" before and after, and the fields of `items.Finding`.
Result = dict[str, Any]


def load(output: Path, item: Item) -> Result | None:
    """The item's last result, None where there is none that can be read."""
    try:
        found = json.loads(_path(output, item).read_text())
        return found if {"verdict", "host", "seconds"} <= found.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _path(output: Path, item: Item) -> Path:
    return output / "items" / f"{item.name}.json"


def is_done(result: Result | None, here: dict[str, str]) -> bool:
    """Whether the item has passed with this code and these packages on this device."""
    if result is None or result["verdict"] != "passed" or result.get("waiting"):
        return False
    return all(result["host"].get(name) == here.get(name) for name in SAME)


def run(
    items: Sequence[Item],
    output: Path,
    *,
    seconds: float = float("inf"),
    again: bool = False,
    engine_args: str = "",
    at_once: int = 1,
    on_result: Callable[[Item, Result], object] = lambda item, result: None,
) -> list[Item]:
    """Run the items that have not passed on this host with this code, parts of them in turn.

    Args:
        seconds: no item is started that might not end within them.
        again: run those that have passed, too.
        engine_args: JSON, see `Setting.engine_args`.
        at_once: items in as many processes, before those that need the device alone.

    Returns:
        the items that there was no time for, or not for all of their parts.
    """
    began = time.monotonic()
    here = host.description() | ({"engine_args": engine_args} if engine_args else {})
    reporting, stopped = threading.Lock(), threading.Event()

    def is_left(item: Item) -> bool:
        waiting = None
        while waiting != []:
            if item.limit + GRACE > seconds - (time.monotonic() - began):
                return True
            result = run_item(item, output, here) | {"host": here}
            if stopped.is_set():
                return True
            with reporting:
                with written_whole(_path(output, item)) as unfinished:
                    unfinished.write_text(json.dumps(result, indent=1))
                on_result(item, result)
            if result["waiting"] and result["waiting"] == waiting:
                return True
            waiting = result["waiting"]
        return False

    if again:
        for item in items:
            shutil.rmtree(output / "parts" / item.name, ignore_errors=True)
    todo = [item for item in items if again or not is_done(load(output, item), here)]
    together = [item for item in todo if at_once > 1 and not item.alone]
    with ThreadPoolExecutor(at_once) as pool:
        try:
            left = [
                item for item, its in zip(together, pool.map(is_left, together), strict=True) if its
            ]
        except BaseException:
            # Leaving the pool waits for what it runs.
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for group in [*_RUNNING]:
                _end(group)
            raise
    return left + [item for item in todo if item not in together and is_left(item)]


def run_item(item: Item, output: Path, here: dict[str, str] | None = None) -> Result:
    """The result of one item, whatever becomes of its process.

    Args:
        here: of `host.description`; parts of the item that were run with the same are not again.
    """
    log, report = output / "logs" / f"{item.name}.log", output / "items" / f"{item.name}.xml"
    for path in (log, report):
        path.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    started, began, clocks = time.gmtime(), time.time(), host.clocks()
    environment = {"HSD_PROOF_OUTPUT": str(output), "HSD_PROOF_ENDS": str(began + item.limit)}
    origin = {name: here[name] for name in SAME if name in here} if here else {}
    environment["HSD_PROOF_ORIGIN"] = json.dumps(origin)
    environment["HSD_PROOF_ENGINE_ARGS"] = origin.get("engine_args", "")
    for name, directory in CACHES.items():
        environment[name] = os.environ.get(name, str(output / "cache" / directory))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=0"]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, f"--junit-xml={report}", item.node],
            cwd=REPOSITORY,
            env=os.environ | environment,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    _RUNNING.add(process.pid)
    try:
        process.wait(item.limit + GRACE)
        outcome = _outcome(report, item, process.returncode)
    except subprocess.TimeoutExpired:
        reason = f"not done after {item.limit + GRACE} seconds."
        outcome = {"verdict": "failed", "reason": reason}
    finally:
        # The item's own children, too: engines outlive a process that is killed.
        _end(process.pid)
        process.wait()
        _RUNNING.discard(process.pid)
        report.unlink(missing_ok=True)
    return {
        **{"name": item.name, "reason": "", "lines": [], "rows": []},
        **{"left_out": [], "waiting": []},
        **outcome,
        "seconds": round(time.time() - began, 1),
        "started": time.strftime("%Y-%m-%d %H:%M", started),
        "clocks": [clocks, host.clocks()],
    }


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _outcome(report: Path, item: Item, status: int) -> Result:
    """Verdict, reason and finding from pytest's own report."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        reason = f"its process ended with status {status} (log: {item.name}.log)."
        return {"verdict": "failed", "reason": reason}
    faults = [mark for case in cases for tag in ("failure", "error") for mark in case.iter(tag)]
    skips = [mark for case in cases for mark in case.iter("skipped")]
    if faults or not cases:
        said = [
            " ".join(mark.get("message", "").removeprefix("Failed: ").split()) for mark in faults
        ]
        more = f" ({len(faults)} of {len(cases)} tests failed)" if len(cases) > 1 else ""
        return {"verdict": "failed", "reason": f"{said[0][:400] if said else 'no test'}{more}"}
    if len(skips) == len(cases):
        reasons = sorted({mark.get("message", "").removeprefix("Skipped: ") for mark in skips})
        return {"verdict": "could not run", "reason": " ".join(reasons)}
    found = [mark.get("value", "") for case in cases for mark in case.iter("property")]
    if found:
        return {"verdict": "passed", **json.loads(found[0])}
    left_out = [f"test {case.get('name')}" for case in cases if case.find("skipped") is not None]
    line = f"{len(cases) - len(skips)} tests passed in {item.tests}."
    return {"verdict": "passed", "lines": [line], "left_out": left_out}


def write_tables(output: Path, item: Item, result: Result) -> None:
    """The CSV file and the figure of an item that has just run."""
    rows = result["rows"]
    if not rows:
        return
    origin = {"device": result["host"]["device"], "clocks": " | ".join(result["clocks"])}
    origin |= {"commit": commit(), "code": result["host"]["code"]}
    with (output / f"{item.name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *origin], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | origin for row in rows)
    if item.figure:
        plot.lines(rows, output / f"{item.name}.png", xscale="log", yscale="log", **item.figure)


def write_report(output: Path, items: Sequence[Item], left: Sequence[Item] = ()) -> str:
    """Write report.md from the results in `output`; return its table of items.

    Args:
        left: items that there was no time for.
    """
    results = {item.name: load(output, item) for item in items}
    table = ["| item | verdict | seconds | what |", "| --- | --- | --- | --- |"]
    sections = []
    for item in items:
        result = results[item.name]
        if result is None:
            table.append(f"| {item.name} | not run yet | | {item.claim} |")
            continue
        passed = result["verdict"] == "passed"
        waiting = result.get("waiting")
        verdict = f"passed, but for {len(waiting)} parts that wait" if waiting else None
        if passed and item in left and not waiting:
            verdict = "passed with other code or versions"
        table.append(
            f"| {item.name} | {verdict or result['verdict']} | {result['seconds']:.0f} | "
            f"{(result['reason'] or item.claim).replace('|', '/')} |"
        )
        sections += ["", f"## {item.name}", "", f"{item.claim}. {result['started']} UTC.", ""]
        sections += [f"- Clocks before and after: {' | '.join(result['clocks'])}"]
        sections += [f"- {line}" for line in result["lines"]]
        sections += [f"- Left out: {line}" for line in result["left_out"]]
        sections += [f"- Waits for another run: {line}" for line in waiting or ()]
        sections += [f"- {len(result['rows'])} rows in {item.name}.csv"] * bool(result["rows"])
    hosts = {tuple(each["host"].items()) for each in results.values() if each}
    lines = ["; ".join(f"{name} {value}" for name, value in each) + "." for each in hosts]
    if len(hosts) > 1:
        lines.insert(0, "The results come from different machines, versions or code:")
    text = "\n".join(["# Proof on a GPU", "", *lines, "", *table, *sections])
    output.mkdir(parents=True, exist_ok=True)
    (output / "report.md").write_text(text + "\n")
    return "\n".join(table)


def main() -> int:
    """0 where nothing failed and nothing is left, 1 for failures, 2 where time ran out."""
    parser = options(__doc__, RESULTS / "gpu")
    names = [item.name for item in ITEMS]
    parser.add_argument("--items", nargs="+", choices=names, default=names, help="only these")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start nothing that may take longer"
    )
    parser.add_argument("--again", action="store_true", help="also what has passed")
    parser.add_argument("--engine-args", default="", help="JSON: of vllm.LLM, for every engine")
    parser.add_argument("--at-once", type=int, default=1, help="items that are not timed, at once")
    args = parser.parse_args()
    # Else the item under way would go on alone, next to those of the next run.
    for each in signal.SIGTERM, signal.SIGHUP:
        signal.signal(each, lambda number, _: sys.exit(128 + number))
    if not torch.cuda.is_available() and TOY not in os.environ:
        print("No CUDA device was found: run this on a host with a GPU.", file=sys.stderr)
        return 1
    output = args.output.absolute()
    chosen = [item for item in ITEMS if item.name in args.items]

    def on_result(item: Item, result: Result) -> None:
        write_tables(output, item, result)
        write_report(output, ITEMS)
        print(f"{item.name}: {result['verdict']} ({result['seconds']:.0f} s) {result['reason']}")
        for line in [*result["lines"], *(f"left out: {each}" for each in result["left_out"])]:
            print(f"  {line}", flush=True)

    left = run(
        chosen,
        output,
        seconds=args.seconds,
        again=args.again,
        engine_args=args.engine_args,
        at_once=args.at_once,
        on_result=on_result,
    )
    print(write_report(output, ITEMS, left))
    print(f"Report: {output / 'report.md'}")
    verdicts = {item.name: (load(output, item) or {}).get("verdict") for item in chosen}
    failed = [name for name, verdict in verdicts.items() if verdict == "failed"]
    unable = [name for name, verdict in verdicts.items() if verdict == "could not run"]
    waiting = [item.name for item in left]
    for label, found in (
        ("Failed", failed),
        ("Could not run", unable),
        ("Left for another run", waiting),
    ):
        if found:
            print(f"{label}: {', '.join(found)}.")
    return 1 if failed else 2 if left or unable else 0


if __name__ == "__main__":
    sys.exit(main())
