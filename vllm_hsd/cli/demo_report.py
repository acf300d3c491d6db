"""What the demo prints and writes: generated text, the table, CSV files and a figure."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import rich.box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from vllm_hsd.cli.demo import Choice, Sample, Setting


# Wall time over CPU time of a process that nobody disturbs is 1, or less with several threads.
BUSY = 1.25


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of one value per round."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        return cls(float(np.median(values)), float(values.min()), float(values.max()))

    def text(self, decimals: int, between: str = " ") -> str:
        low, high = f"{self.low:.{decimals}f}", f"{self.high:.{decimals}f}"
        return f"{self.median:.{decimals}f}{between}({low}-{high})"


@dataclass(frozen=True)
class Row:
    """One configuration at one temperature.

    Attributes:
        tokens_per_second, to_none, to_single: spread over rounds; the ratios compare the rates of
            one round, in which the configurations took turns.
        cpu_to_none, cpu_to_single: the same ratios in CPU time, for machines that are busy.
        block_efficiency: tokens per target call, all rounds together.
        acceptance: per level, cheapest first: accepted / drafted.
    """

    temperature: float
    role: str
    name: str
    draft_lengths: list[int]
    tokens_per_second: Spread
    to_none: Spread
    to_single: Spread
    cpu_to_none: Spread
    cpu_to_single: Spread
    block_efficiency: float
    acceptance: list[float]


def report(
    setting: Setting,
    choices: dict[float, dict[str, Choice]],
    samples: list[Sample],
    console: Console,
) -> int:
    """Print and write everything; returns 1 if greedy outputs differ, else 0."""
    rows = [
        row
        for temperature, chosen in choices.items()
        for row in summarise(temperature, chosen, samples)
    ]
    print_texts(setting, samples, console)
    console.print(table(rows))
    console.print(
        "T: temperature; to none, to single: rate over that of no speculation, of the best single "
        "draft; per call: tokens per call of the target; accepted: of what each level drafted."
    )
    console.print(f"One prompt at a time, median (smallest-largest) of {setting.rounds} rounds.")
    console.print(f"Note: {setting.note}.")
    busy = sum(s.run.seconds for s in samples) / sum(s.run.cpu_seconds for s in samples)
    if busy > BUSY:
        console.print(
            f"[yellow]The cores were busy with something else (wall time {busy:.1f} times CPU "
            "time): these times say little; the ratios in CPU time are in the CSV file."
        )
    write_csv(rows, setting, setting.out / "demo.csv")
    plot(rows, setting, setting.out / "demo.png")
    console.print(f"Written: {setting.out / 'demo.csv'}, {setting.out / 'demo.png'}")
    differences = greedy_differences(samples)
    for line in differences:
        console.print(f"[bold red]{line}")
    if differences:
        return 1
    if 0.0 in choices:
        console.print("[green]Greedy outputs are equal, token for token.")
    return 0


def summarise(temperature: float, chosen: dict[str, Choice], samples: list[Sample]) -> list[Row]:
    """One row per role at one temperature."""
    own = [sample for sample in samples if sample.temperature == temperature]
    wall = {role: _rates([s for s in own if s.role == role], "seconds") for role in chosen}
    cpu = {role: _rates([s for s in own if s.role == role], "cpu_seconds") for role in chosen}
    rows = []
    for role, choice in chosen.items():
        runs = [sample.run for sample in own if sample.role == role]
        levels = choice.contender.levels
        drafted = np.sum([[run.levels[i]["drafted"] for i in levels] for run in runs], axis=0)
        accepted = np.sum([[run.levels[i]["accepted"] for i in levels] for run in runs], axis=0)
        rows.append(
            Row(
                temperature,
                role,
                choice.contender.name,
                choice.draft_lengths,
                Spread.of(wall[role]),
                Spread.of(wall[role] / wall["none"]),
                Spread.of(wall[role] / wall["single"]),
                Spread.of(cpu[role] / cpu["none"]),
                Spread.of(cpu[role] / cpu["single"]),
                sum(run.tokens for run in runs) / sum(run.target_calls for run in runs),
                (accepted / np.maximum(drafted, 1)).tolist(),
            )
        )
    return rows


def _rates(samples: list[Sample], clock: str) -> np.ndarray:
    """[rounds] tokens per second of the runs' `seconds` or `cpu_seconds`."""
    rounds = sorted({sample.round for sample in samples})
    parts = [[s.run for s in samples if s.round == round_] for round_ in rounds]
    return np.array(
        [sum(r.tokens for r in part) / sum(getattr(r, clock) for r in part) for part in parts]
    )


def greedy_differences(samples: list[Sample]) -> list[str]:
    """One sentence per greedy run whose tokens differ from those without speculation."""
    greedy = [sample for sample in samples if sample.temperature == 0]
    plain = {(s.round, s.prompt): s.run.token_ids[0] for s in greedy if s.role == "none"}
    lines = []
    for sample in greedy:
        theirs, ours = plain[sample.round, sample.prompt], sample.run.token_ids[0]
        if ours != theirs:
            unequal = [a != b for a, b in zip(ours, theirs, strict=False)]
            at = unequal.index(True) if True in unequal else min(len(ours), len(theirs))
            lines.append(
                f"Greedy outputs differ: {sample.role}, prompt {sample.prompt}, round "
                f"{sample.round}, from token {at} on ({ours[at : at + 3]} where no speculation "
                f"gives {theirs[at : at + 3]})."
            )
    return lines


def print_texts(setting: Setting, samples: list[Sample], console: Console) -> None:
    """What the cascade wrote, one prompt per temperature."""
    for temperature in setting.temperatures:
        sample = next(s for s in samples if s.role == "cascade" and s.temperature == temperature)
        console.rule(f"the cascade's text at temperature {temperature:g}")
        console.print(setting.prompts[sample.prompt], end="", style="dim", markup=False)
        console.print(sample.run.texts[0], markup=False, highlight=False)
    console.rule()


def table(rows: list[Row]) -> Table:
    """The rows for a terminal of 80 columns: spreads stand below their medians."""
    result = Table(box=rich.box.SIMPLE, pad_edge=False, padding=0)
    for heading in (
        "T", "configuration", "tokens/s", "to none", "to single", "per call", "accepted",
    ):  # fmt: skip
        wraps = heading in ("configuration", "accepted")
        result.add_column(heading, no_wrap=not wraps, min_width=13 if wraps else None)
    for i, row in enumerate(rows):
        result.add_row(
            f"{row.temperature:g}",
            f"{row.name}\n{' '.join(str(budget) for budget in row.draft_lengths)}",
            row.tokens_per_second.text(1, "\n"),
            row.to_none.text(2, "\n"),
            row.to_single.text(2, "\n"),
            f"{row.block_efficiency:.2f}",
            " ".join(f"{rate:.2f}" for rate in row.acceptance) or "-",
            end_section=i + 1 < len(rows) and rows[i + 1].temperature != row.temperature,
        )
    return result


def write_csv(rows: list[Row], setting: Setting, path: Path) -> None:
    """The rows with their spread, and the note on the target beside each."""
    with path.open("w", newline="") as file:
        writer = None
        for row in rows:
            flat: dict[str, object] = {}
            for key, value in asdict(row).items():
                if isinstance(value, dict):
                    flat |= {f"{key}_{part}": f"{number:.4f}" for part, number in value.items()}
                elif isinstance(value, list):
                    flat[key] = " ".join(f"{number:.4g}" for number in value)
                else:
                    flat[key] = value
            flat |= {"rounds": setting.rounds, "note": setting.note}
            if writer is None:
                writer = csv.DictWriter(file, flat)
                writer.writeheader()
            writer.writerow(flat)


def plot(rows: list[Row], setting: Setting, path: Path) -> None:
    """Tokens per second, one group of bars per temperature, with the spread over rounds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    temperatures = sorted({row.temperature for row in rows})
    roles = list(dict.fromkeys(row.role for row in rows))
    width = 0.8 / len(roles)
    labels = {"none": "no speculation", "single": "best single draft", "cascade": "cascade"}
    for i, role in enumerate(roles):
        own = [row for row in rows if row.role == role]
        places = [temperatures.index(row.temperature) + i * width for row in own]
        spreads = [row.tokens_per_second for row in own]
        medians = [spread.median for spread in spreads]
        errors = [
            [spread.median - spread.low for spread in spreads],
            [spread.high - spread.median for spread in spreads],
        ]
        bars = axes.bar(places, medians, width, yerr=errors, capsize=3, label=labels[role])
        axes.bar_label(
            bars,
            [f"{row.name} {row.draft_lengths or ''}\n{row.to_none.median:.2f}x" for row in own],
            fontsize=7,
            padding=3,
        )
    axes.set_xticks([i + width * (len(roles) - 1) / 2 for i in range(len(temperatures))])
    axes.set_xticklabels([f"temperature {temperature:g}" for temperature in temperatures])
    axes.set_ylabel("tokens per second, one prompt at a time")
    axes.margins(y=0.2)
    axes.set_title(setting.note, fontsize=8, wrap=True)
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(path, dpi=150)
