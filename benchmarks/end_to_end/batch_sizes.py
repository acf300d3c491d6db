"""Tokens per second over the batch size: no speculation, single drafts and cascades.

    python benchmarks/end_to_end/batch_sizes.py     # about a quarter of an hour

On the widened target (the tiny target's function at the cost of a larger model, see
benchmarks/models/widen.py). All configurations take turns in every round, on two engines: one
without speculation, one that hosts both drafters. Writes results/batch_sizes/: every configuration
with its spread, in wall and CPU time, and a figure of the fastest single draft, the fastest cascade
and no speculation.
"""

import argparse
import csv
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from rich.progress import Progress

from vllm_hsd.cli.demo import REPOSITORY, TARGET_PARAMS, family_prompts, widened
from vllm_hsd.cli.demo_report import Spread
from vllm_hsd.engine_runs import EngineProcess

MODELS = REPOSITORY / "benchmarks" / "models"
OUT = REPOSITORY / "results" / "batch_sizes"
BATCHES = (1, 4, 8, 16)
TEMPERATURES = (0.0, 1.0)
MAX_TOKENS = 48
# Levels of the hosting engine by the configuration's name, and the draft_lengths that are measured.
CONFIGURATIONS = {
    "no speculation": ([], [[]]),
    "small": ([0], [[2], [4], [6]]),
    "mid": ([1], [[2], [4], [6], [10]]),
    "small, mid": ([0, 1], [[2, 4], [3, 6], [4, 10]]),
}
SPECULATIVE_CONFIG = {
    "method": "hsd",
    "num_speculative_tokens": 10,
    "levels": [
        {"model": str(MODELS / "small"), "num_tokens": 6},
        {"model": str(MODELS / "mid")},
    ],
}


def measure(rounds: int, target: Path) -> list[dict]:
    """One row per configuration, batch size and temperature."""
    configurations = [
        (name, b) for name, (_, draft_lengths) in CONFIGURATIONS.items() for b in draft_lengths
    ]
    cases = [(batch, temperature) for batch in BATCHES for temperature in TEMPERATURES]
    prompts = family_prompts(MODELS)
    rows = []
    with ExitStack() as stack:
        plain, hosting = (
            stack.enter_context(EngineProcess(name, target, config, OUT / "logs" / f"{name}.log"))
            for name, config in (("plain", None), ("hosting", SPECULATIVE_CONFIG))
        )
        progress = stack.enter_context(Progress())
        task = progress.add_task("measuring", total=len(cases) * rounds * len(configurations))
        for engine in (plain, hosting):
            engine.generate(prompts[:1], 1.0, MAX_TOKENS)
        for batch, temperature in cases:
            runs = {i: [] for i in range(len(configurations))}
            for round_ in range(rounds):
                for i, (name, draft_lengths) in enumerate(configurations):
                    engine = hosting if draft_lengths else plain
                    if draft_lengths:
                        engine.use(draft_lengths, CONFIGURATIONS[name][0])
                    # Batch 1 takes the first prompts one by one, so that all see several texts.
                    parts = (
                        [prompts[j : j + 1] for j in range(4)] if batch == 1 else [prompts[:batch]]
                    )
                    runs[i].append(
                        [
                            engine.generate(part, temperature, MAX_TOKENS, 100 * round_ + j)
                            for j, part in enumerate(parts)
                        ]
                    )
                    progress.advance(task)
            rows += case_rows(batch, temperature, configurations, runs)
    return rows


def case_rows(batch, temperature, configurations, runs) -> list[dict]:
    """Rows of one batch size and temperature; configuration 0 is no speculation."""

    def rates(i: int, clock: str) -> np.ndarray:
        return np.array(
            [sum(r.tokens for r in part) / sum(getattr(r, clock) for r in part) for part in runs[i]]
        )

    rows = []
    for i, (name, draft_lengths) in enumerate(configurations):
        row = {
            "batch": batch,
            "temperature": temperature,
            "configuration": name,
            "draft_lengths": " ".join(map(str, draft_lengths)),
        }
        flat = [run for part in runs[i] for run in part]
        calls = sum(run.target_calls for run in flat)
        row["block_efficiency"] = f"{sum(run.tokens for run in flat) / calls:.3f}"
        for clock, prefix in (("seconds", ""), ("cpu_seconds", "cpu_")):
            own, none = rates(i, clock), rates(0, clock)
            for key, values in (("tokens_per_second", own), ("to_none", own / none)):
                spread = Spread.of(values)
                row |= {
                    f"{prefix}{key}": f"{spread.median:.3f}",
                    f"{prefix}{key}_low": f"{spread.low:.3f}",
                    f"{prefix}{key}_high": f"{spread.high:.3f}",
                }
        rows.append(row)
    return rows


def fastest(rows: list[dict], batch: int, temperature: float, kind: str) -> dict:
    """The fastest of the single drafts, of the cascades, or no speculation."""
    own = [
        row
        for row in rows
        if (row["batch"], row["temperature"]) == (batch, temperature)
        and kind_of(row["configuration"]) == kind
    ]
    return max(own, key=lambda row: float(row["tokens_per_second"]))


def kind_of(name: str) -> str:
    levels = len(CONFIGURATIONS[name][0])
    return ("no speculation", "single draft")[levels] if levels < 2 else "cascade"


def plot(rows: list[dict], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, temperature in zip(figure.subplots(1, 2, sharey=True), TEMPERATURES, strict=True):
        for kind in ("no speculation", "single draft", "cascade"):
            best = [fastest(rows, batch, temperature, kind) for batch in BATCHES]
            axes.plot(BATCHES, [float(row["to_none"]) for row in best], "o-", label=kind)
            for batch, row in zip(BATCHES, best, strict=True):
                axes.annotate(
                    f"{row['configuration']} {row['draft_lengths']}"
                    if row["draft_lengths"]
                    else "",
                    (batch, float(row["to_none"])),
                    fontsize=6,
                )
        axes.set_xscale("log", base=2)
        axes.set_xlabel("batch size")
        axes.set_title(f"temperature {temperature:g}")
    axes.legend()
    figure.axes[0].set_ylabel("tokens/s, to no speculation")
    figure.suptitle(f"Target widened to the cost of {TARGET_PARAMS / 1e6:.0f} M parameters")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    rows = measure(
        arguments.rounds, widened(MODELS, TARGET_PARAMS, REPOSITORY / "results" / "models")
    )
    with (OUT / "batch_sizes.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    plot(rows, OUT / "batch_sizes.png")
    for row in rows:
        print(
            f"batch {row['batch']:2} temperature {row['temperature']:g} {row['configuration']:15}"
            f"{row['draft_lengths']:6} {row['tokens_per_second']:>8} tokens/s, to no speculation "
            f"{row['to_none']} ({row['to_none_low']}-{row['to_none_high']}), in CPU time "
            f"{row['cpu_to_none']} ({row['cpu_to_none_low']}-{row['cpu_to_none_high']})"
        )


if __name__ == "__main__":
    main()
