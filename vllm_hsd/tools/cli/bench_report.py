"""What `vllm-hsd bench` reports: rows of figures, and tables of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from rich.console import RenderableType

from vllm_hsd.tools import system
from vllm_hsd.tools.cli import bench_drafts, bench_quality, greedy
from vllm_hsd.tools.cli.bench_jobs import Results
from vllm_hsd.tools.cli.options import columns
from vllm_hsd.tools.engine import Generation

Row = dict[str, Any]
FIGURES = (
    *("tokens_per_second", "speedup", "speedup_low", "speedup_high", "tokens_per_step"),
    *("acceptance", "ttft_ms", "tpot_ms", "greedy_differences", "greedy_gap"),
    *bench_drafts.FIGURES,
    "sources",
)
HEADINGS = ("configuration", "tok/s", "speed-up", "tok/step", "accepted", "TTFT ms", "differ")
NOTES = (
    "speed-up: over no speculation in the same round (lowest-highest of all rounds). tok/step: "
    "tokens per decoding step of the target. accepted: share of each level's draft tokens that the "
    "next model accepted, cheapest level first. TTFT: time to first token. differ: greedy outputs "
    "that are not those of no speculation (in its own row: not those of its first round)."
)


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
        **dict.fromkeys(FIGURES),
    }
    if index in results.errors:
        return {**row, "error": results.errors[index]}
    own = _by_round(results, index, batch_size, temperature)
    rates = [_rate(generations) for generations in own]
    plain = _by_round(results, 0, batch_size, temperature)
    speedups = [rate / base for rate, base in zip(rates, map(_rate, plain), strict=True)]
    everything = list(chain.from_iterable(own))
    row |= {
        "tokens_per_second": statistics.median(rates),
        "speedup": statistics.median(speedups),
        "speedup_low": min(speedups),
        "speedup_high": max(speedups),
        "tokens_per_step": tokens_per_step(everything),
        "acceptance": acceptance(everything),
        "ttft_ms": 1e3 * statistics.median(t for g in everything for t in g.first_token_seconds),
        "tpot_ms": bench_quality.time_per_output_token(everything),
        **bench_drafts.figures(everything, list(chain.from_iterable(plain)), batch_size),
        "sources": bench_drafts.sources(row["config"], everything) or None,
    }
    if temperature == 0:
        gaps = [
            each.gap
            for each in results.differences
            if (each.job.config, each.job.batch_size) == (index, batch_size)
        ]
        row["greedy_differences"] = len(gaps)
        if gaps and math.isfinite(max(gaps)):
            row["greedy_gap"] = max(gaps)
    return {k: round(value, 4) if isinstance(value, float) else value for k, value in row.items()}


def _by_round(
    results: Results, index: int, batch_size: int, temperature: float
) -> list[list[Generation]]:
    found: list[list[Generation]] = [[] for _ in range(results.comparison.rounds)]
    for job, generation in results.generations.items():
        if (job.config, job.batch_size, job.temperature) == (index, batch_size, temperature):
            found[job.round].append(generation)
    return found


def _rate(generations: Sequence[Generation]) -> float:
    return sum(g.num_tokens for g in generations) / sum(g.seconds for g in generations)


def tokens_per_step(generations: Sequence[Generation]) -> float | None:
    """Tokens per decoding step of the target and request, without prefill and its token."""
    requests = sum(len(generation.token_ids) for generation in generations)
    steps = sum(generation.num_target_steps for generation in generations) - requests
    tokens = sum(generation.num_tokens for generation in generations) - requests
    return tokens / steps if steps else None


def acceptance(generations: Sequence[Generation]) -> list[float | None]:
    """Accepted over drafted tokens: of every level, cheapest first, or of vLLM's own drafter."""
    counts = [
        [(level["drafted"], level["accepted"]) for level in each.levels]
        or [(each.drafted, each.accepted)]
        for each in generations
    ]
    totals = [tuple(map(sum, zip(*level, strict=True))) for level in zip(*counts, strict=True)]
    if not any(each.levels or each.drafted for each in generations):
        return []
    return [round(a / d, 4) if d else None for d, a in totals]


def machine(device: str, threads: int) -> str:
    """The processor or accelerator that engines run on, with what vLLM uses of it."""
    cores = f"{system.cores()} core{'s' * (system.cores() > 1)}"
    if device != "cpu":
        return f"{device}, host {system.processor()}, {cores}"
    plural = "s" if threads > 1 else ""
    return f"{system.processor()}, {cores}, {threads} thread{plural} per engine"


def environment(data: Mapping[str, Any]) -> list[str]:
    """Model, machine and versions, a line each."""
    versions = ", ".join(f"{name} {number}" for name, number in data["versions"].items())
    return [
        f"Model: {data['model']} ({data['dtype']})",
        f"Machine: {data['machine']}",
        f"Versions: {versions}",
    ]


def heading(data: Mapping[str, Any]) -> list[str]:
    """What is compared, on what, from the results' metadata."""
    size = f"{data['num_prompts']} prompts, {data['max_tokens']} tokens each"
    return [*environment(data), f"{size}, {data['rounds']} rounds"]


def cells(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of one batch size and temperature, with their title."""
    for (size, temperature), own in groupby(rows, lambda r: (r["batch_size"], r["temperature"])):
        yield f"Batch size {size}, temperature {temperature:g}", list(own)


def figures(row: Row) -> tuple[str, ...]:
    """A row in the columns of HEADINGS."""
    return (
        row["name"],
        f"{row['tokens_per_second']:.1f}",
        f"{row['speedup']:.2f} ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})"
        + "!" * bench_quality.exceeds_tokens_per_step(row),
        number(row["tokens_per_step"], 2),
        " ".join(number(rate, 2) for rate in row["acceptance"]) or "-",
        number(row["ttft_ms"], 1),
        number(row["greedy_differences"], 0),
    )


def number(value: float | None, decimals: int) -> str:
    """A figure as it is shown; a dash for none."""
    return "-" if value is None else f"{value:.{decimals}f}"


def report(results: Results, rows: Sequence[Row]) -> list[RenderableType]:
    """The rows as tables, with what the columns mean."""
    parts: list[RenderableType] = []
    for title, own in cells(rows):
        measured = [row for row in own if not row.get("error")]
        parts += ["", title, columns(HEADINGS, map(figures, measured))]
        parts += [f"{r['name']}  could not run: {r['error']}" for r in own if r.get("error")]
        if drafting := [row for row in measured if row["redundancy"] is not None]:
            parts += ["", columns(bench_drafts.HEADINGS, map(bench_drafts.cells, drafting))]
        if by_source := bench_drafts.source_cells(measured):
            parts += ["", columns(bench_drafts.SOURCE_HEADINGS, by_source)]
        parts += branches(results, own)
    noted = (f"Note: {note}" for note in bench_quality.sentences(results, rows))
    return [*parts, "", *notes(results), *noted]


def notes(results: Results) -> list[str]:
    """What the columns mean, and sentences about greedy answers that differ or are found again."""
    rounds, tokens = results.comparison.rounds, results.comparison.max_tokens
    counted = f"Medians of {rounds} rounds, answers of {tokens} tokens, past their ends."
    meaning = f"{counted} {NOTES} {bench_drafts.NOTES}"
    if "shared_tokens" in str(results.comparison.configs):
        meaning += (
            " With shared_tokens the answers of earlier rounds, which have the same prompts, are "
            "found again: more than new requests would find."
        )
    return [meaning, *greedy.sentences(results, results.differences, results.metadata["dtype"])]


def branches(results: Results, rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for every row whose drafts had branches."""
    for index, row in enumerate(rows):
        own = _by_round(results, index, row["batch_size"], row["temperature"])
        if said := bench_drafts.branches(row["name"], list(chain.from_iterable(own))):
            yield said
