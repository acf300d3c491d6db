"""Real answers of a real chat model, by every source of drafts alone and by all of them together.

    python -m benchmarks.end_to_end.demo          # or `make demo`; at most eight minutes

SmolLM2-135M-Instruct answers prompts that were written for this demo (demo_prompts.jsonl: six kinds
of six). Every prompt is answered without speculation and with every source, in an order that
rotates, at temperature 0 and 0.7; rounds of one prompt of each kind go on until the time is over.
Writes demo.csv and demo.png. Ends with status 1 if greedy answers differ (in 16 bits: elsewhere
than at near ties of the target's own logits).
"""

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from benchmarks import chat_model
from benchmarks.common import RESULTS, Spread, commit, saved_figure, write_csv
from benchmarks.end_to_end.sources import missing, sources
from vllm_hsd.cli import bench, bench_report, greedy
from vllm_hsd.cli.bench_jobs import Job, Results
from vllm_hsd.cli.bench_runs import Engines, compare_greedy
from vllm_hsd.engine import Generation

PROMPTS = Path(__file__).parent / "demo_prompts.jsonl"
TEMPERATURES = [0.0, 0.7]
ALL = "all kinds"
# Lines of a streamed answer on the terminal.
SHOWN = 240


def read_demo_prompts() -> dict[str, list[str]]:
    """Prompts by kind."""
    prompts: dict[str, list[str]] = {}
    for line in PROMPTS.read_text().splitlines():
        entry = json.loads(line)
        prompts.setdefault(entry["kind"], []).append(entry["turns"][0])
    return prompts


class Screen:
    """Answers as they are written: in place on a terminal, a line for each one elsewhere."""

    def __init__(self, names: Sequence[str]) -> None:
        self._console = Console()
        self._live = Live(console=self._console, refresh_per_second=6, transient=True)
        self._names = names
        self._answers = [""] * len(names)
        self._rates = [""] * len(names)
        self._title = ""

    def __enter__(self) -> "Screen":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def ask(self, title: str) -> None:
        """A new prompt, which all configurations are going to answer."""
        self._title = title
        self._answers = [""] * len(self._names)
        self._rates = [""] * len(self._names)

    def add(self, index: int, text: str) -> None:
        """More of a configuration's answer."""
        self._answers[index] += text
        self._draw()

    def finish(self, index: int, found: Generation, done: str) -> None:
        """A configuration has answered."""
        steps = bench_report.tokens_per_step([found])
        self._rates[index] = f"{found.num_tokens / found.seconds:.1f} tokens/s"
        self._draw()
        if not self._console.is_terminal:
            answer = " ".join(found.texts[0].split())[:60]
            per_step = "" if steps is None else f", {steps:.2f} tokens per step"
            print(
                f"{time.strftime('%H:%M:%S')} {done} {self._title}, {self._names[index]}: "
                f"{self._rates[index]}{per_step}: {answer} ...",
                flush=True,
            )

    def _draw(self) -> None:
        if not self._console.is_terminal:
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column()
        for name, rate, answer in zip(self._names, self._rates, self._answers, strict=True):
            table.add_row(name, rate, Text(" ".join(answer.split())[-SHOWN:]))
        self._live.update(Group(Text(self._title, style="bold"), table))


def stream_first_answer(engines: Engines, prompt_ids: Sequence[int], max_tokens: int) -> float:
    """Show the first answer word by word, without speculation.

    Returns:
        the time at which its first word was there, in seconds of `time.time`.
    """
    times = []

    def show(_: int, text: str) -> None:
        times.append(time.time())
        print(text, end="", flush=True)

    engines.get(0).generate([prompt_ids], {"temperature": 0.0, "max_tokens": max_tokens}, show)
    print("\n")
    return times[0]


def measure(
    results: Results, prompt_ids: list[list[int]], kinds: list[str], engines: Engines, until: float
) -> None:
    """Answer rounds of prompts until the time is over or every prompt was answered.

    Args:
        prompt_ids: by kind, then number.
        until: no round starts that would probably end after this time of `time.monotonic`.
    """
    comparison = results.comparison
    count = len(comparison.configs)
    per_kind = len(prompt_ids) // len(kinds)
    longest, rounds = 0.0, 0
    with Screen(comparison.names) as screen:
        for round_ in range(per_kind):
            began = time.monotonic()
            if round_ and began + longest > until:
                break
            asked = itertools.product(comparison.temperatures, range(len(kinds)))
            for number, (temperature, kind) in enumerate(asked):
                prompt = kind * per_kind + round_
                screen.ask(f"round {round_ + 1}, {kinds[kind]}, temperature {temperature:g}")
                for shift in range(count):
                    index = (round_ + number + shift) % count
                    job = Job(index, round_, 1, temperature, kind, (prompt,))
                    params = {
                        "temperature": temperature,
                        "max_tokens": comparison.max_tokens,
                        "seed": round_,
                    }
                    found = engines.get(index).generate(
                        [prompt_ids[prompt]], params, lambda _, text, i=index: screen.add(i, text)
                    )
                    results.generations[job] = found
                    screen.finish(index, found, f"[{len(results.generations)}]")
            longest, rounds = max(longest, time.monotonic() - began), rounds + 1
    results.comparison = replace(comparison, rounds=rounds)


def table_rows(results: Results, kinds: list[str]) -> list[dict[str, Any]]:
    """A row per temperature, kind of prompt (and all of them) and configuration.

    A speed-up is that of one round: the configuration's rate over that of no speculation.
    """
    comparison = results.comparison
    rows = []
    for temperature, kind in itertools.product(comparison.temperatures, [*kinds, ALL]):
        chosen = range(len(kinds)) if kind == ALL else [kinds.index(kind)]
        for index, name in enumerate(comparison.names):
            rates, speedups, found = [], [], []
            for round_ in range(comparison.rounds):
                own, plain = (
                    [
                        generation
                        for job, generation in results.generations.items()
                        if (job.config, job.round, job.temperature) == (config, round_, temperature)
                        and job.part in chosen
                    ]
                    for config in (index, 0)
                )
                rates.append(_rate(own))
                speedups.append(rates[-1] / _rate(plain))
                found += own
            rows.append(
                {
                    "temperature": temperature,
                    "kind": kind,
                    "configuration": name,
                    "rounds": comparison.rounds,
                    "tokens_per_second": statistics.median(rates),
                    **Spread.of(speedups).columns("speedup"),
                    "tokens_per_step": bench_report.tokens_per_step(found) or 1.0,
                    "dtype": results.metadata["dtype"],
                }
            )
    return rows


def _rate(generations: Sequence[Generation]) -> float:
    return sum(g.num_tokens for g in generations) / sum(g.seconds for g in generations)


def print_tables(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    for temperature in TEMPERATURES:
        table = Table(title=f"Speed-up over no speculation, temperature {temperature:g}")
        table.add_column("prompts")
        table.add_column("no speculation, tokens/s", justify="right")
        for name in names[1:]:
            table.add_column(name, justify="right")
        for kind in dict.fromkeys(row["kind"] for row in rows):
            own = [row for row in rows if (row["temperature"], row["kind"]) == (temperature, kind)]
            table.add_row(
                kind,
                f"{own[0]['tokens_per_second']:.1f}",
                *(
                    f"{float(row['speedup']):.2f} ({float(row['speedup_low']):.2f}-"
                    f"{float(row['speedup_high']):.2f})"
                    for row in own[1:]
                ),
                end_section=kind != ALL,
            )
        console.print(table)
    console.print(
        f"Medians of {rows[0]['rounds']} rounds of one prompt of each kind, lowest to highest.",
        soft_wrap=True,
    )


def plot(rows: Sequence[dict[str, Any]], names: Sequence[str], title: str, path: Path) -> None:
    """Bars: median speed-up by kind of prompt; lines: lowest to highest round."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    width = 0.8 / (len(names) - 1)
    with saved_figure(path, 10, 6.5) as figure:
        panels = figure.subplots(2, 1, sharex=True, sharey=True)
        for axes, temperature in zip(panels, TEMPERATURES, strict=True):
            for i, name in enumerate(names[1:]):
                own = [
                    row
                    for row in rows
                    if (row["temperature"], row["configuration"]) == (temperature, name)
                ]
                middle, low, high = (
                    [float(row[column]) for row in own]
                    for column in ("speedup", "speedup_low", "speedup_high")
                )
                errors = [
                    [m - value for m, value in zip(middle, low, strict=True)],
                    [value - m for m, value in zip(middle, high, strict=True)],
                ]
                places = [kinds.index(row["kind"]) + i * width for row in own]
                axes.bar(places, middle, width, yerr=errors, capsize=2, label=name)
            axes.axhline(1, color="gray", linewidth=0.8)
            axes.set_ylabel("speed-up")
            axes.set_title(f"temperature {temperature:g}", fontsize=9)
        panels[1].set_xticks([k + width * (len(names) - 2) / 2 for k in range(len(kinds))], kinds)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
        figure.suptitle(title, fontsize=8)


def main() -> int:
    parser = chat_model.options(__doc__, RESULTS / "demo")
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="time after which no round starts"
    )
    parser.add_argument("--rounds", type=int, default=6, help="most prompts of each kind")
    options = parser.parse_args()
    began = time.monotonic()
    # `make demo` says when it was called: .venv and the model are part of the wait.
    called = float(os.environ.get("DEMO_STARTED") or time.time())
    for sentence in missing():
        print(sentence)
    by_kind = {kind: texts[: options.rounds] for kind, texts in read_demo_prompts().items()}
    configs = [None, *sources()]
    prompts = [[{"role": "user", "content": text}] for texts in by_kind.values() for text in texts]
    comparison, setup = chat_model.compared(
        options, configs, prompts, temperatures=TEMPERATURES, rounds=options.rounds
    )
    results = Results(comparison, metadata=bench.describe(comparison, setup))
    kinds, names = list(by_kind), comparison.names
    with Engines(comparison, setup) as engines:
        engines.get(0)
        print(f"\n> {by_kind[kinds[0]][0]}\n", flush=True)
        waited = stream_first_answer(engines, setup.prompt_ids[0], options.max_tokens) - called
        print(f"First streamed answer {waited:.0f} s after the call.", flush=True)
        for index in range(1, len(configs)):
            engines.get(index)
        measure(results, setup.prompt_ids, kinds, engines, began + 60 * options.minutes)
        compare_greedy(results, setup, engines)
    rows = table_rows(results, kinds)
    print_tables(rows, names)
    for line in bench_report.warnings(results):
        print(f"Note: {line}")
    for line in greedy.sentences(results, results.differences, setup.dtype):
        print(line)
    wrong = greedy.unexplained(results.differences, setup.dtype)
    if not results.differences:
        print("Greedy answers are equal, token for token.")
    write_csv(options.output / "demo.csv", rows)
    title = (
        f"SmolLM2-135M-Instruct, {setup.dtype}, {results.metadata['machine']}, commit {commit()}\n"
        "bars: median speed-up over no speculation; lines: lowest to highest round"
    )
    plot(rows, names, title, options.output / "demo.png")
    print(f"Written: {options.output / 'demo.csv'}, {options.output / 'demo.png'}")
    print(f"{time.monotonic() - began:.0f} s; first answer {waited:.0f} s after the call.")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
