"""Rows of studies: columns of one schema from answers, their CSV file, and means over sets."""

import csv
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import write_csv
from vllm_hsd.tools.cli import bench_drafts, bench_quality, bench_report
from vllm_hsd.tools.engine import Generation

# Columns of every study: of the cell; of time; of counts; where it was run. What a study does not
# measure is empty. `speedup` is a ratio of rates over all batches, `speedup_low` and `_high` are
# what `spread` says of single batches, `ci_low` and `_high` its 95 % interval (bootstrap over
# batches); `first_token` and `per_token` are times over those of no speculation, TTFT and TPOT as
# in `vllm bench serve`; `tokens_per_step` leaves the prefill out, `block_efficiency` holds it;
# `by_place` is the share of steps in which the first, second, ... draft token was accepted;
# `engine` is "compiled" or "eager".
COLUMNS = (
    *("group", "set", "x", "batch_size", "temperature", "cache", "configuration", "batches"),
    *("tokens_per_second", "speedup", "speedup_low", "speedup_high", "spread"),
    *("first_token", "per_token", "tokens_per_step", "acceptance", "draft_length", "no_draft"),
    *("block_efficiency", "block_efficiency_sd", "redundancy", "target_utilization"),
    *("generated_per_target_call", "greedy_differences", "largest_gap", "dtype", "max_tokens"),
    "engine",
    *("ci_low", "ci_high", "ttft_p50_ms", "tpot_p50_ms", "tpot_p99_ms", "by_place"),
)
# What is measured once.
KEY = "group", "set", "x", "batch_size", "temperature", "cache", "configuration"
RESAMPLES, PLACES = 2000, 8


class Table:
    """The CSV file of a study."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def rows(self) -> list[dict[str, str]]:
        """None where there is no file; of what was measured again, the last."""
        if not self.path.exists():
            return []
        with self.path.open() as file:
            rows = list(csv.DictReader(file))
        return list({tuple(row.get(name) for name in KEY): row for row in rows}.values())

    def has(self, **cell: Any) -> bool:
        """Whether there is a row with these values, numbers written as `write_csv` writes them."""
        written = {k: f"{v:.4f}" if isinstance(v, float) else str(v) for k, v in cell.items()}
        return any(written.items() <= row.items() for row in self.rows)

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows; what they do not have is empty."""
        write_csv(self.path, [dict.fromkeys(COLUMNS, "") | row for row in rows], append=True)


def times(own: Sequence[Any], plain: Sequence[Any]) -> dict[str, Any]:
    """Columns of time: answers against those of no speculation to the same batches."""
    ratios = [rate([a]) / rate([b]) for a, b in zip(own, plain, strict=True)]
    low, high = np.quantile(ratios, (0.25, 0.75))
    first, first_plain = (
        statistics.fmean(s for each in found for s in each.first_token_seconds)
        for found in (own, plain)
    )
    return {
        "batches": len(own),
        "tokens_per_second": rate(own),
        "speedup": rate(own) / rate(plain),
        "speedup_low": float(low),
        "speedup_high": float(high),
        "spread": "quartiles of batches",
        "first_token": first / first_plain,
    }


def interval(own: Sequence[Any], plain: Sequence[Any]) -> dict[str, float]:
    """Columns of the speed-up's 95 % interval: both are resampled by the same batches."""
    tokens, seconds = (
        np.array([[getattr(each, name) for each in found] for found in (own, plain)])
        for name in ("num_tokens", "seconds")
    )
    low, high = bootstrap(tokens, seconds)
    return {"ci_low": low, "ci_high": high}


def bootstrap(totals: np.ndarray, units: np.ndarray) -> tuple[float, float]:
    """95 % interval of one rate over another, each a sum of [2, N] totals over that of units."""
    count = totals.shape[1]
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    rates = totals[:, drawn].sum(-1) / units[:, drawn].sum(-1)
    low, high = np.quantile(rates[0] / rates[1], (0.025, 0.975))
    return float(low), float(high)


def latencies(answers: Sequence[Generation]) -> dict[str, Any]:
    """Columns of TTFT and TPOT, percentiles over requests, and of acceptance by place."""
    first = [seconds for each in answers for seconds in each.first_token_seconds]
    found: dict[str, Any] = {"ttft_p50_ms": 1e3 * statistics.median(first)}
    if times := bench_quality.times_per_output_token(answers):
        found["tpot_p50_ms"], found["tpot_p99_ms"] = map(float, np.quantile(times, (0.5, 0.99)))
    # The first step of a request is that of its prompt.
    steps = np.array([n for each in answers for own in each.step_lengths for n in own[1:]])
    if steps.size and steps.max() > 1:
        shares = [(steps > place + 1).mean() for place in range(min(int(steps.max()) - 1, PLACES))]
        found["by_place"] = " ".join(f"{share:.2f}" for share in shares)
    return found


def rate(answers: Sequence[Any]) -> float:
    """Tokens per second of all together."""
    return sum(each.num_tokens for each in answers) / sum(each.seconds for each in answers)


def chosen(answers: Sequence[Any]) -> dict[str, float]:
    """Mean draft length and the share of drafts without a token; nothing without speculation."""
    # Of an engine that hosts several cascades, the highest level that took part.
    levels = [each.levels for each in answers if each.levels]
    tops = [next((k for k in reversed(own) if k["requested"]), own[-1]) for own in levels]
    requested = sum(level["requested"] for level in tops)
    names = {"draft_length": "drafted", "no_draft": "empty"} if requested else {}
    return {c: sum(level[name] for level in tops) / requested for c, name in names.items()}


def counts(answers: Sequence[Generation]) -> dict[str, Any]:
    """Columns of counts: of steps, and of drafted and accepted tokens at every level."""
    rates = bench_report.acceptance(answers)
    found = {
        "tokens_per_step": bench_report.tokens_per_step(answers) or 1.0,
        "acceptance": " ".join("-" if rate is None else f"{rate:.3f}" for rate in rates),
    }
    steps = sum(each.num_target_steps for each in answers)
    if not (answers[0].levels and steps):
        return found
    efficiency = [each.num_tokens / each.num_target_steps for each in answers]
    generated = bench_drafts.generated_tokens(answers)
    return found | {
        "block_efficiency": float(np.mean(efficiency)),
        "block_efficiency_sd": float(np.std(efficiency, ddof=1)) if len(efficiency) > 1 else "",
        "redundancy": 1 - sum(each.accepted for each in answers) / generated if generated else "",
        "target_utilization": steps / sum(each.num_tokens for each in answers),
        "generated_per_target_call": generated / steps,
    }


def means(rows: Sequence[Mapping[str, Any]], measure: str) -> Iterator[str]:
    """A Markdown table for every group: a measure by configuration and temperature, mean of the
    sets."""
    for group in dict.fromkeys(row["group"] for row in rows):
        own = [row for row in rows if row["group"] == group]
        columns = sorted({row["temperature"] for row in own}, key=float)
        yield f"\n{group}, {measure}, mean of {len({row['set'] for row in own})} sets\n"
        yield f"| configuration | {' | '.join(f'{float(each):g}' for each in columns)} |"
        yield "| --- |" + " --- |" * len(columns)
        for name in dict.fromkeys(row["configuration"] for row in own):
            mine = [row for row in own if row["configuration"] == name]
            found = (
                [float(row[measure]) for row in mine if row["temperature"] == each]
                for each in columns
            )
            yield f"| {name} | {' | '.join(f'{statistics.fmean(v):.2f}' for v in found)} |"
