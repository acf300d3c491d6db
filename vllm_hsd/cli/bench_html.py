"""bench.html: the figures of `vllm-hsd bench` on one page that loads nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from vllm_hsd.cli import bench_quality
from vllm_hsd.cli.bench_jobs import Results

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}
body{color:#1c2430}
h1{font-size:1.4rem;margin-bottom:.2rem}h2{font-size:1.05rem;margin:1.8rem 0 .4rem}
table{border-collapse:collapse;width:100%}
td,th{padding:.3rem .6rem;text-align:right;border-bottom:1px solid #e3e7ee}
td:first-child,th:first-child{text-align:left}
th{font-weight:600;color:#5a6678}
.facts{color:#5a6678}.bar{position:relative;min-width:14rem;text-align:left}
.bar i{position:absolute;left:.6rem;top:.45rem;height:1rem;background:#9cc5f5;border-radius:2px}
.bar.slow i{background:#f3b5a5}.bar b{position:relative;padding-left:.3rem;font-weight:500}
.note{background:#fff6dd;border-left:4px solid #e2b33c;padding:.4rem .8rem;margin:.4rem 0}
code{font-size:.85em;word-break:break-all}
"""


def page(results: Results, rows: Sequence[dict[str, Any]], warnings: Sequence[str]) -> str:
    """The page.

    Args:
        rows: of `bench_report.rows`.
        warnings: sentences on what makes the figures less trustworthy than they look.
    """
    data = results.metadata
    versions = ", ".join(f"{name} {number}" for name, number in data["versions"].items())
    facts = (
        f"{data['model']} ({data['dtype']}). {data['machine']}. {versions}. {data['num_prompts']} "
        f"prompts, {data['max_tokens']} tokens each, {data['rounds']} rounds."
    )
    top = max((row["speedup_high"] or 0 for row in rows), default=0) or 1
    parts = [f"<h1>Speculative decoding compared</h1><p class=facts>{escape(facts)}</p>"]
    parts += [f"<p class=note>{escape(sentence)}</p>" for sentence in warnings]
    cells = dict.fromkeys((row["batch_size"], row["temperature"]) for row in rows)
    for batch_size, temperature in cells:
        parts.append(f"<h2>Batch size {batch_size}, temperature {temperature:g}</h2><table>")
        parts.append(
            "<tr><th>configuration<th>speed-up over no speculation (lowest-highest round)"
            "<th>tokens/s<th>tokens per step<th>accepted<th>time to first token</tr>"
        )
        parts += [
            _row(row, top)
            for row in rows
            if (row["batch_size"], row["temperature"]) == (batch_size, temperature)
        ]
        parts.append("</table>")
    parts.append("<h2>Configurations</h2><table>")
    for name, config in zip(results.comparison.names, results.comparison.configs, strict=True):
        text = escape(json.dumps(config)) if config else "-"
        parts.append(f"<tr><td>{escape(name)}<td><code>{text}</code></tr>")
    parts.append("</table>")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>vllm-hsd bench</title>"
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _row(row: dict[str, Any], top: float) -> str:
    name = f"<tr><td>{escape(row['name'])}"
    if row.get("error"):
        return f"{name}<td colspan=5>could not run: {escape(row['error'])}</tr>"
    width, kind = 13 * row["speedup"] / top, "bar slow" if row["speedup"] < 1 else "bar"
    mark = " (more than its tokens per step)" if bench_quality.exceeds_tokens_per_step(row) else ""
    return (
        f'{name}<td class="{kind}"><i style="width:{width:.2f}rem"></i>'
        f"<b>{row['speedup']:.2f} ({row['speedup_low']:.2f}-{row['speedup_high']:.2f}){mark}</b>"
        f"<td>{row['tokens_per_second']:.1f}<td>{_number(row['tokens_per_step'], '.2f')}"
        f"<td>{' '.join(_number(rate, '.0%') for rate in row['acceptance']) or '-'}"
        f"<td>{_number(row['ttft_ms'], '.0f')} ms</tr>"
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
