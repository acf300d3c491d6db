"""report.md, and a CSV file and a figure for every item that has rows."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import commit
from benchmarks.gpu.items import Item
from benchmarks.gpu.results import Result
from benchmarks.plot import saved_figure

# Rows that report.md shows; the CSV file has all.
SHOWN = 40


def write(output: Path, items: Sequence[Item], left: Sequence[Item] = ()) -> str:
    """Write report.md from the results in `output`; return its table of items.

    Args:
        left: items that there was no time for.
    """
    results = {item.name: Result.load(output, item) for item in items}
    known = [result for result in results.values() if result is not None]
    table = _markdown([_summary(item, results[item.name], item in left) for item in items])
    lines = ["# Proof on a GPU", "", *_hosts(known), "", table]
    for item in items:
        result = results[item.name]
        if result is not None and (result.lines or result.rows or result.left_out):
            lines += ["", *_section(output, item, result)]
    output.mkdir(parents=True, exist_ok=True)
    (output / "report.md").write_text("\n".join(lines) + "\n")
    return table


def write_tables(output: Path, item: Item, result: Result) -> None:
    """The CSV file and the figure of an item that has just run."""
    if not result.rows:
        return
    origin = {"device": result.host["device"], "clocks": " | ".join(result.clocks)}
    origin |= {"commit": commit(), "code": result.host["code"]}
    with (output / f"{item.name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*result.rows[0], *origin], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | origin for row in result.rows)
    plot = getattr(item.load(), "plot", None)
    if plot is not None:
        with saved_figure(output / f"{item.name}.png", 9, 4) as figure:
            plot(result.rows, figure)


def _hosts(results: Sequence[Result]) -> list[str]:
    """The machines and versions that the results come from; one, where all is well."""
    if not results:
        return ["No item has run."]
    hosts = list({tuple(result.host.items()) for result in results})
    lines = ["; ".join(f"{name} {value}" for name, value in each) + "." for each in hosts]
    if len(hosts) > 1:
        lines.insert(0, "The results come from different machines, versions or code:")
    return lines


def _summary(item: Item, result: Result | None, left: bool) -> dict[str, Any]:
    row = {"item": item.name, "verdict": "not run yet", "seconds": "", "what": item.claim}
    if left and result is not None and result.verdict == "passed":
        row["verdict"] = "passed with other code or versions"
    elif result is not None:
        row["verdict"] = result.verdict
    if result is not None:
        row["seconds"] = f"{result.seconds:.0f}"
        if result.reason:
            row["what"] = result.reason
    return row


def _section(output: Path, item: Item, result: Result) -> list[str]:
    lines = [f"## {item.name}", "", f"Claim: {item.claim}. {result.started} UTC.", ""]
    clocks = [text for text in result.clocks if text]
    if clocks:
        lines += [f"Clocks before and after: {' | '.join(clocks)}.", ""]
    lines += [f"- {line}" for line in result.lines]
    lines += [f"- Left out: {line}" for line in result.left_out]
    if result.rows:
        lines += ["", _markdown(result.rows[:SHOWN])]
        if len(result.rows) > SHOWN:
            lines += ["", f"{len(result.rows) - SHOWN} more rows in {item.name}.csv."]
    if (output / f"{item.name}.png").exists():
        lines += ["", f"![{item.name}]({item.name}.png)"]
    return lines


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [names, ["---"] * len(names), *cells])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
