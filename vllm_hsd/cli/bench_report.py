"""What `vllm-hsd bench` reports: rows of figures, a table, CSV, JSON and a chart."""

from __future__ import annotations

import csv
import json
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_hsd import host
from vllm_hsd.checked_files import written_whole
from vllm_hsd.cli import bench_html, bench_quality, greedy
from vllm_hsd.cli.bench_jobs import Job, Results
from vllm_hsd.engine import Generation

Row = dict[str, Any]
WIDTH = 98
NAME_WIDTH = 25


def rows(results: Results) -> list[Row]:
    """One row per batch size, temperature and configuration; numbers are None after an error."""
    comparison = results.comparison
    return [
        _row(results, index, batch_size, temperature)
        for batch_size in comparison.batch_sizes
        for temperature in comparison.temperatures
        for index in range(len(comparison.configs))
    ]


def _row(results: Results, index: int, batch_size: int, temperature: float) -> Row:
    comparison = results.comparison
    row: Row = {
        "config": comparison.configs[index],
        "name": comparison.names[index],
        "batch_size": batch_size,
        "temperature": temperature,
        "rounds": comparison.rounds,
        **dict.fromkeys(
            ("tokens_per_second", "speedup", "speedup_low", "speedup_high", "tokens_per_step")
        ),
        **dict.fromkeys(("acceptance", "ttft_ms", "tpot_ms", "greedy_differences", "greedy_gap")),
    }
    if index in results.errors:
        return {**row, "error": results.errors[index]}
    own = _by_round(results, index, batch_size, temperature)
    rates = [_rate(generations.values()) for generations in own]
    baseline = _by_round(results, 0, batch_size, temperature)
    speedups = [
        rate / _rate(generations.values())
        for rate, generations in zip(rates, baseline, strict=True)
    ]
    everything = [generation for part in own for generation in part.values()]
    row |= {
        "tokens_per_second": statistics.median(rates),
        "speedup": statistics.median(speedups),
        "speedup_low": min(speedups),
        "speedup_high": max(speedups),
        "tokens_per_step": tokens_per_step(everything),
        "acceptance": acceptance(everything),
        "ttft_ms": 1e3 * statistics.median(t for g in everything for t in g.first_token_seconds),
        "tpot_ms": bench_quality.time_per_output_token(everything),
    }
    if temperature == 0:
        own_gaps = [
            each.gap
            for each in results.differences
            if _cell(each.job) == (index, batch_size, temperature)
        ]
        row["greedy_differences"] = len(own_gaps)
        if own_gaps and math.isfinite(max(own_gaps)):
            row["greedy_gap"] = max(own_gaps)
    return {
        key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()
    }


def _by_round(
    results: Results, index: int, batch_size: int, temperature: float
) -> list[dict[int, Generation]]:
    """Per round, the generations by batch of prompts."""
    found: list[dict[int, Generation]] = [{} for _ in range(results.comparison.rounds)]
    for job, generation in results.generations.items():
        if _cell(job) == (index, batch_size, temperature):
            found[job.round][job.part] = generation
    return found


def _cell(job: Job) -> tuple[int, int, float]:
    return job.config, job.batch_size, job.temperature


def _rate(generations: Any) -> float:
    parts = list(generations)
    return sum(part.num_tokens for part in parts) / sum(part.seconds for part in parts)


def tokens_per_step(generations: Sequence[Generation]) -> float | None:
    """Tokens per decoding step of the target and request, without prefill and its token."""
    requests = sum(len(generation.token_ids) for generation in generations)
    steps = sum(generation.num_target_steps for generation in generations) - requests
    tokens = sum(generation.num_tokens for generation in generations) - requests
    return tokens / steps if steps else None


def acceptance(generations: Sequence[Generation]) -> list[float | None]:
    """Accepted over drafted tokens: of every level, cheapest first, or of vLLM's own drafter."""
    levels = [generation.levels for generation in generations]
    if levels and levels[0]:
        drafted = [sum(level["drafted"] for level in each) for each in zip(*levels, strict=True)]
        accepted = [sum(level["accepted"] for level in each) for each in zip(*levels, strict=True)]
    else:
        drafted = [sum(generation.drafted for generation in generations)]
        accepted = [sum(generation.accepted for generation in generations)]
        if not drafted[0]:
            return []
    return [round(a / d, 4) if d else None for a, d in zip(accepted, drafted, strict=True)]


def machine(device: str, threads: int) -> str:
    """The processor or accelerator that engines run on, with what vLLM uses of it."""
    cores = f"{host.cores()} cores"
    if device != "cpu":
        return f"{device}, host {host.processor()}, {cores}"
    plural = "s" if threads > 1 else ""
    return f"{host.processor()}, {cores}, {threads} thread{plural} per engine"


def heading(results: Results) -> str:
    """What is compared, on what."""
    data = results.metadata
    size = f"{data['num_prompts']} prompts, {data['max_tokens']} tokens each"
    return "\n".join([*environment(data), f"{size}, {data['rounds']} rounds"])


def environment(data: Mapping[str, Any]) -> list[str]:
    """Model, machine and versions, a line each."""
    versions = ", ".join(f"{name} {number}" for name, number in data["versions"].items())
    return [
        f"Model: {data['model']} ({data['dtype']})",
        f"Machine: {data['machine']}",
        f"Versions: {versions}",
    ]


def table(results: Results, rows: Sequence[Row]) -> str:
    """The rows as text of at most WIDTH columns, with what the columns mean."""
    lines = [""]
    previous = None
    for row in rows:
        cell = (row["batch_size"], row["temperature"])
        if cell != previous:
            lines += [
                f"Batch size {cell[0]}, temperature {cell[1]:g}",
                _line(
                    "configuration", "tok/s", "speed-up", "tok/step", "accepted",
                    "TTFT ms", "differ",
                ),
            ]  # fmt: skip
        previous = cell
        if row.get("error"):
            lines += textwrap.wrap(
                f"{_short(row['name'])}  could not run: {row['error']}",
                WIDTH,
                subsequent_indent="    ",
            )
            continue
        lines.append(
            _line(
                row["name"],
                f"{row['tokens_per_second']:.1f}",
                f"{row['speedup']:.2f} ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})"
                + "!" * bench_quality.exceeds_tokens_per_step(row),
                _number(row["tokens_per_step"], 2),
                " ".join(_number(rate, 2) for rate in row["acceptance"]) or "-",
                _number(row["ttft_ms"], 1),
                "-" if row["greedy_differences"] is None else str(row["greedy_differences"]),
            )
        )
    notes = (
        f"Medians of {results.comparison.rounds} rounds. speed-up: over no speculation in the same "
        "round (lowest-highest of all rounds). tok/step: tokens per decoding step of the target. "
        "accepted: share of each level's draft tokens that the next model accepted, cheapest level "
        "first. TTFT: time to first token. differ: greedy outputs that are not those of no "
        "speculation (in its own row: not those of its first round)."
    )
    lines += ["", *textwrap.wrap(notes, WIDTH)]
    for sentence in greedy.sentences(results, results.differences, results.metadata["dtype"]):
        lines += textwrap.wrap(sentence, WIDTH)
    for note in warnings(results, rows):
        lines += textwrap.wrap(f"Note: {note}", WIDTH)
    return "\n".join(lines)


def warnings(results: Results, rows: Sequence[Row] = ()) -> list[str]:
    """What makes the figures less trustworthy than they look."""
    notes = bench_quality.sentences(results, rows)
    if not results.metadata["on_host"]:
        return notes
    comparison = results.comparison
    stock = [config for config in comparison.configs if config and config.get("method") != "hsd"]
    if max(comparison.temperatures) > 0 and any(
        config.get("rejection_sample_method") not in ("block", "hierarchical") for config in stock
    ):
        notes.append(
            "on CPU vLLM's own rejection sampler is known to sample wrongly at temperatures "
            "above 0 (vLLM issues 55005 and 55006)."
        )
    return notes


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"


def _line(name: str, *cells: str) -> str:
    widths = (8, 18, 8, 14, 7, 6)
    return "  ".join(
        [f"{_short(name):{NAME_WIDTH}}"]
        + [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
    )[:WIDTH].rstrip()


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def write(results: Results, rows: Sequence[Row]) -> list[str]:
    """Write bench.json, bench.csv, bench.html and, where matplotlib is installed, bench.png.

    Returns:
        lines that say what was written and what was not.
    """
    output = results.comparison.output
    paths = [output / "bench.json", output / "bench.csv"]
    document = {**results.metadata, "rows": list(rows)}
    with written_whole(paths[0]) as unfinished:
        unfinished.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    with written_whole(paths[1]) as unfinished, unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "error"])
        writer.writeheader()
        for row in rows:
            rates = row["acceptance"]
            flat = {
                **row,
                "config": "" if row["config"] is None else json.dumps(row["config"]),
                "acceptance": None if rates is None else " ".join(_number(r, 4) for r in rates),
            }
            writer.writerow(flat)
    lines = []
    try:
        with written_whole(output / "bench.png") as unfinished:
            plot(results, rows, unfinished)
        paths.append(output / "bench.png")
    except ImportError:
        lines.append("bench.png was skipped: pip install 'vllm-hsd[bench]' for matplotlib.")
    with written_whole(output / "bench.html") as unfinished:
        unfinished.write_text(bench_html.page(results, rows, warnings(results, rows)))
    paths.append(output / "bench.html")
    return [f"Written: {', '.join(map(str, paths))}", *lines]


def plot(results: Results, rows: Sequence[Row], path: Path) -> None:
    """Speed-up over no speculation, one panel per temperature, with the spread over rounds.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    comparison = results.comparison
    temperatures, batch_sizes = comparison.temperatures, comparison.batch_sizes
    names = comparison.names
    width = 0.8 / len(names)
    figure = Figure(figsize=(1.5 + 3.5 * len(temperatures), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for axes, temperature in zip(panels, temperatures, strict=True):
        for i, name in enumerate(names):
            own = [
                row
                for row in rows
                if (row["name"], row["temperature"]) == (name, temperature) and row["speedup"]
            ]
            values = [row["speedup"] for row in own]
            errors = [
                [row["speedup"] - row["speedup_low"] for row in own],
                [row["speedup_high"] - row["speedup"] for row in own],
            ]
            places = [batch_sizes.index(row["batch_size"]) + i * width for row in own]
            bars = axes.bar(places, values, width, yerr=errors, capsize=2, label=name)
            labels = [f"{row['tokens_per_second']:.0f}" for row in own]
            axes.bar_label(bars, labels, fontsize=7, padding=2)
        axes.axhline(1, color="gray", linewidth=0.8)
        axes.set_xticks([k + width * (len(names) - 1) / 2 for k in range(len(batch_sizes))])
        axes.set_xticklabels([str(size) for size in batch_sizes])
        axes.set_xlabel("batch size")
        axes.set_title(f"temperature {temperature:g}", fontsize=9)
    panels[0].set_ylabel("speed-up over no speculation")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", fontsize=8, ncols=2
    )
    data = results.metadata
    title = (
        f"{data['model']}, {data['dtype']}; {data['machine']}\nbars: speed-up; numbers: tokens/s"
    )
    figure.suptitle(title, fontsize=8)
    figure.savefig(path, dpi=150, format="png")
