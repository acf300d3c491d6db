"""Files that `vllm-hsd bench` writes: bench.json, bench.csv, and a page to look at."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence

from rich.bar import Bar
from rich.console import RenderableType

from vllm_hsd.checked_files import write_json, written_whole
from vllm_hsd.tools.cli import bench_report
from vllm_hsd.tools.cli.bench_jobs import Results
from vllm_hsd.tools.cli.bench_report import Row
from vllm_hsd.tools.cli.options import columns, rendered

NAMES = "bench.json", "bench.csv", "bench.html"
# Characters of the longest bar.
BAR = 50


def page(results: Results, rows: Sequence[Row]) -> str:
    """The report as HTML, with bars of the speed-ups and all configurations as they were given."""
    measured = [row for row in rows if not row.get("error")]
    most = max(row["speedup"] for row in measured)
    parts: list[RenderableType] = [*bench_report.heading(results.metadata)]
    for title, own in bench_report.cells(measured):
        bars = ((row["name"], Bar(most, 0, row["speedup"], width=BAR)) for row in own)
        parts += ["", columns((title, "speed-up"), bars)]
    parts += bench_report.report(results, rows)
    comparison = results.comparison
    for name, config in zip(comparison.names[1:], comparison.configs[1:], strict=True):
        parts += ["", f"{name}: {json.dumps(config)}"]
    return rendered(parts).export_html()


def write(results: Results, rows: Sequence[Row]) -> str:
    """Write bench.json, bench.csv and bench.html; returns the line that says so."""
    files = [results.comparison.output / name for name in NAMES]
    write_json(files[0], {**results.metadata, "rows": list(rows)})
    with written_whole(files[1]) as unfinished, unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "error"])
        writer.writeheader()
        for row in rows:
            config = "" if row["config"] is None else json.dumps(row["config"])
            rates = " ".join(bench_report.number(rate, 4) for rate in row["acceptance"] or ())
            steps = " ".join(map(str, row["accepted_per_step"] or ()))
            by_source = " ".join(
                f"{source} {own['accepted']}/{own['drafted']}"
                for source, own in (row["sources"] or {}).items()
            )
            cells = {"config": config, "acceptance": rates, "accepted_per_step": steps}
            cells["sources"] = by_source
            writer.writerow({**row, **cells})
    with written_whole(files[2]) as unfinished:
        unfinished.write_text(page(results, rows))
    return f"Written: {', '.join(map(str, files))}"
