"""Files that `vllm-hsd bench` writes: bench.json, bench.csv, and a page to look at."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from string import Template

from vllm_hsd.checked_files import write_json, written_whole
from vllm_hsd.tools.cli import bench_drafts, bench_quality, bench_report
from vllm_hsd.tools.cli.bench_jobs import Results
from vllm_hsd.tools.cli.bench_report import Row

NAMES = "bench.json", "bench.csv", "bench.html"
# Loads nothing from elsewhere; bars are drawn by the style sheet.
PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>vllm-hsd bench</title><style>
:root { color-scheme: light dark; --bar: #4a8fd9; --line: #8888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
th:nth-child(-n+2), td:first-child { text-align: left; }
.sources td:nth-child(2) { text-align: left; }
small, td:first-child { white-space: nowrap; }
td.bar { width: 30%; min-width: 9rem; }
.track { position: relative; height: 1.1rem; }
.track i { position: absolute; inset: 0 auto 0 0; background: var(--bar); border-radius: 2px; }
.track b { position: absolute; top: 45%; height: 2px; background: currentColor; }
.track u { position: absolute; top: -.2rem; bottom: -.2rem; border-left: 1px dashed currentColor; }
.warn { border-left: 4px solid #d98a1f; padding: .2rem 1rem; background: #d98a1f22; }
small, .meaning { opacity: .75; } code { overflow-wrap: anywhere; }
</style></head><body><h1>vllm-hsd bench</h1><p>$heading</p>$warnings$tables
<h2>Configurations</h2><ul>$configurations</ul>$notes</body></html>
""")
HEADINGS = (
    *(bench_report.HEADINGS[0], "speed-up", "", *bench_report.HEADINGS[1:2]),
    *(*bench_report.HEADINGS[3:], *bench_drafts.HEADINGS[1:]),
)


def page(results: Results, rows: Sequence[Row]) -> str:
    """An HTML page: bars of speed-ups with their range over the rounds, and all figures.

    The dashed line in a bar's place is the speed without speculation.
    """
    named = zip(results.comparison.names[1:], results.comparison.configs[1:], strict=True)
    warned = "".join(f"<p>{escape(note)}</p>" for note in bench_quality.sentences(results, rows))
    most = max((row["speedup_high"] for row in rows if not row.get("error")), default=1.0)
    return PAGE.substitute(
        heading="<br>".join(map(escape, bench_report.heading(results.metadata))),
        warnings=f'<div class="warn">{warned}</div>' if warned else "",
        tables="".join(
            f"<h2>{escape(title)}</h2>{_table(own, most)}{_sources(own)}"
            + _paragraphs(bench_report.branches(results, own))
            for title, own in bench_report.cells(rows)
        ),
        configurations="".join(
            f"<li>{escape(name)}: <code>{escape(json.dumps(config))}</code></li>"
            for name, config in named
        ),
        notes=_paragraphs(bench_report.notes(results)),
    )


def _paragraphs(sentences: Iterable[str]) -> str:
    return "".join(f'<p class="meaning">{escape(sentence)}</p>' for sentence in sentences)


def _table(rows: Sequence[Row], most: float) -> str:
    lines = [f"<tr>{''.join(f'<th>{name}</th>' for name in HEADINGS)}</tr>"]
    for row in rows:
        if error := row.get("error"):
            said = f'<td colspan="{len(HEADINGS) - 1}">could not run: {escape(error)}</td>'
            lines.append(f"<tr><td>{escape(row['name'])}</td>{said}</tr>")
        else:
            lines.append(f"<tr>{''.join(_cells(row, most))}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _sources(rows: Sequence[Row]) -> str:
    lines = bench_drafts.source_cells([row for row in rows if not row.get("error")])
    if not lines:
        return ""
    header = "".join(f"<th>{name}</th>" for name in bench_drafts.SOURCE_HEADINGS)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines
    )
    return f'<table class="sources"><tr>{header}</tr>{body}</table>'


def _cells(row: Row, most: float) -> Iterator[str]:
    name, rate, speedup, *others = map(escape, bench_report.figures(row))
    value, low, high, one = (
        f"{100 * each / most:.1f}%"
        for each in (row["speedup"], row["speedup_low"], row["speedup_high"], 1.0)
    )
    yield f"<td>{name}</td>"
    yield (
        f'<td class="bar"><div class="track"><i style="width:{value}"></i>'
        f'<b style="left:{low};width:calc({high} - {low})"></b><u style="left:{one}"></u>'
        "</div></td>"
    )
    number, _, spread = speedup.partition(" ")
    yield f"<td>{number}<br><small>{spread}</small></td><td>{rate}</td>"
    yield from (f"<td>{each}</td>" for each in others)
    yield from (f"<td>{escape(each)}</td>" for each in bench_drafts.cells(row)[1:])


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
