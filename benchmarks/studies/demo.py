"""Real answers of a real chat model, without speculation, by vLLM's own methods and by ours.

    python -m benchmarks.studies.demo             # or `make demo`; at most eight minutes

SmolLM2-135M-Instruct answers prompts that were written for this demo (demo_prompts.jsonl: six kinds
of six). Every prompt is answered by all configurations, in an order that rotates, at temperature 0
and 0.7; rounds of one prompt of each kind go on until the time is over. A slow machine shows fewer
configurations and temperature 0 alone, and says so. Writes demo.csv and demo.png. Ends with status
1 if greedy answers differ (in 16 bits: elsewhere than at near ties of the target's own logits).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from benchmarks import columns, plot, sweep
from benchmarks.common import RESULTS, commit
from benchmarks.studies.configs import HEAD, has_head, ours, vllms_own
from benchmarks.sweep import PLAIN, Cell, Config, Sweep
from vllm_hsd.tools.cli import bench_quality, bench_report
from vllm_hsd.tools.cli.bench_jobs import Results
from vllm_hsd.tools.cli.bench_runs import Engines
from vllm_hsd.tools.engine import Generation

PROMPTS = Path(__file__).parent / "demo_prompts.jsonl"
TEMPERATURES = [0.0, 0.7]
ALL = "all kinds"
# Lines of a streamed answer on the terminal.
SHOWN = 240
# Shown however slow the machine is: no speculation, ours and vLLM's.
FEWEST_CONFIGURATIONS = 3


def read_prompts(path: Path = PROMPTS) -> dict[str, list[str]]:
    """Prompts by kind."""
    prompts: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
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
        self._title, self._done = "", 0

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

    def finish(self, index: int, found: Generation) -> None:
        """A configuration has answered."""
        self._done += 1
        steps = bench_report.tokens_per_step([found])
        self._rates[index] = f"{found.num_tokens / found.seconds:.1f} tokens/s"
        self._draw()
        if not self._console.is_terminal:
            answer = " ".join(found.texts[0].split())[:60]
            per_step = "" if steps is None else f", {steps:.2f} tokens per step"
            print(
                f"{time.strftime('%H:%M:%S')} [{self._done}] {self._title}, {self._names[index]}: "
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


def stream_first_answer(engines: Sweep) -> tuple[float, float]:
    """Show the first answer word by word, without speculation.

    Returns:
        when its first word was there and how long all of it took, in seconds of `time.time`.
    """
    times, began = [], time.time()

    def show(_: int, text: str) -> None:
        times.append(time.time())
        print(text, end="", flush=True)

    params = {**engines.params, "temperature": 0.0}
    engines.engines.get(0).generate(engines.setup.prompt_ids[:1], params, show)
    print("\n")
    return times[0], time.time() - began


def start(engines: Sweep, answer_seconds: float, until: float) -> list[float]:
    """Start as many engines, in their order, as have the time for a round of answers.

    Args:
        answer_seconds: of one, without speculation.
        until: see `measure`.

    Returns:
        the temperatures that a round has time for; the first one always.
    """
    names, slowest, count = engines.names, 0.0, 1
    while count < len(names):
        needed = slowest + (count + 1) * answer_seconds
        if count >= FEWEST_CONFIGURATIONS and time.monotonic() + needed > until:
            break
        began = time.monotonic()
        engines.engines.get(count)
        slowest, count = max(slowest, time.monotonic() - began), count + 1
    engines.names, left_out = names[:count], [*names[count:]]
    left = (until - time.monotonic()) / (count * answer_seconds)
    temperatures = TEMPERATURES[: max(int(left), 1)]
    left_out += [f"temperature {each:g}" for each in TEMPERATURES[len(temperatures) :]]
    if left_out:
        print(
            f"This machine is slow, a round of answers without speculation takes it "
            f"{answer_seconds:.0f} s; left out: {', '.join(left_out)} (--minutes makes room).",
            flush=True,
        )
    return temperatures


def measure(
    engines: Sweep,
    kinds: Sequence[str],
    rounds: int,
    until: float,
    temperatures: Sequence[float] = TEMPERATURES,
) -> list[Cell]:
    """Answer rounds of a prompt of every kind until the time is over.

    Args:
        until: no round starts that would probably end after this time of `time.monotonic`.
    """
    cells = [
        Cell("", kind, [(number * rounds + round_,) for round_ in range(rounds)], temperature)
        for temperature in temperatures
        for number, kind in enumerate(kinds)
    ]
    longest = 0.0
    with Screen(engines.names) as screen:
        for round_ in range(rounds):
            began = time.monotonic()
            if round_ and began + longest > until:
                break
            for turn, cell in enumerate(cells):
                screen.ask(f"round {round_ + 1}, {cell.set}, temperature {cell.temperature:g}")
                engines.answer(cell, round_, turn, screen.add, screen.finish)
            longest = max(longest, time.monotonic() - began)
    return cells


def print_notes(results: Results, rows: Sequence[dict[str, Any]]) -> None:
    """Say before the tables what makes them less trustworthy than they look."""
    disturbed = bench_quality.summary(results).sentences(results.metadata["on_host"])
    for note in bench_quality.sentences(results, rows):
        print(f"{'Disturbed' if note in disturbed else 'Note'}: {note}")


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    for temperature in plot.values(rows, "temperature"):
        table = Table(title=f"Speed-up over no speculation, temperature {temperature:g}")
        table.add_column("configuration", max_width=34)
        at = [row for row in rows if row["temperature"] == temperature]
        for kind in plot.values(at, "set"):
            table.add_column(kind, justify="right", no_wrap=True)
        for name in plot.values(at, "configuration"):
            *own, whole = [row for row in at if row["configuration"] == name]
            if name == PLAIN:
                rates = (f"{row['tokens_per_second']:.1f}" for row in (*own, whole))
                table.add_row(f"{name}, tokens/s", *rates, end_section=True)
                continue
            table.add_row(
                name,
                *map(_marked, own),
                f"{_marked(whole)} ({whole['speedup_low']:.2f}-{whole['speedup_high']:.2f})",
            )
        console.print(table)
    console.print("All answers of a kind together (quartiles of single answers).", soft_wrap=True)


def _marked(row: dict[str, Any]) -> str:
    return f"{row['speedup']:.2f}" + "!" * bench_quality.exceeds_tokens_per_step(row)


def options(description: str, output: Path, minutes: float) -> argparse.ArgumentParser:
    """A parser with the options of a demo."""
    parser = sweep.options(description, output)
    parser.add_argument(
        "--minutes", type=float, default=minutes, help="time after which no round starts"
    )
    parser.add_argument("--rounds", type=int, default=6, help="most prompts of each kind")
    parser.add_argument("--kinds", nargs="*", help="of prompts (default: all)")
    return parser


def run(
    chosen: argparse.Namespace,
    configs: Mapping[str, Config],
    name: str,
    model: str,
    engines_class: type[Engines] = Engines,
    prompts: Path = PROMPTS,
    **engine_args: Any,
) -> int:
    """Answer, print the tables, write the files.

    Args:
        chosen: values of `options`.
        name: of the files.
        model: what the figure calls the target.
        engines_class, engine_args: see `sweep.started`.
        prompts: a file of them.

    Returns:
        1 if greedy answers differ, else 0.
    """
    began = time.monotonic()
    # The Makefile says when it was called: .venv and the model are part of the wait.
    called = float(os.environ.get("DEMO_STARTED") or time.time())
    every = read_prompts(prompts)
    by_kind = {kind: every[kind][: chosen.rounds] for kind in chosen.kinds or every}
    kinds, rounds = list(by_kind), min(map(len, by_kind.values()))
    chats = [[{"role": "user", "content": text}] for texts in by_kind.values() for text in texts]
    with sweep.started(
        chosen,
        configs,
        chats,
        temperatures=TEMPERATURES,
        ignore_eos=False,
        engines_class=engines_class,
        **engine_args,
    ) as engines:
        engines.engines.get(0)
        until = began + 60 * chosen.minutes
        print(f"\n> {by_kind[kinds[0]][0]}\n", flush=True)
        first_word, seconds = stream_first_answer(engines)
        waited = first_word - called
        print(f"First streamed answer {waited:.0f} s after the call.", flush=True)
        temperatures = start(engines, len(kinds) * seconds, until)
        cells = measure(engines, kinds, rounds, until, temperatures)
        faults = engines.compare()
    rows = []
    for temperature in temperatures:
        own = [cell for cell in cells if cell.temperature == temperature]
        rows += [row for cell in own for row in engines.rows([cell])]
        rows += engines.rows(own, set=ALL)
    print_notes(engines.results, rows)
    print_tables(rows)
    for line in faults:
        print(line)
    if not engines.results.differences:
        print("Greedy answers are equal, token for token.")
    table = columns.Table(chosen.output / f"{name}.csv")
    table.path.unlink(missing_ok=True)
    table.add(rows)
    plot.bars(
        [row for row in rows if row["configuration"] != PLAIN],
        table.path.with_suffix(".png"),
        x="set",
        panel="temperature",
        measure="speedup",
        title=f"{model}, {chosen.dtype}, {table.rows[0]['machine']}, commit "
        f"{commit()}\nbars: speed-up over no speculation; lines: quartiles of single answers",
    )
    print(f"Written: {table.path}, {table.path.with_suffix('.png')}")
    print(f"{time.monotonic() - began:.0f} s; first answer {waited:.0f} s after the call.")
    return 1 if faults else 0


def main() -> int:
    chosen = options(__doc__, RESULTS / "demo", 7.0).parse_args()
    if not has_head():
        print(f"No EAGLE-3 head: {os.path.relpath(HEAD)} is not there.")
    # Where time is short the last ones are left out.
    pairs = zip(reversed(ours().items()), reversed(vllms_own().items()), strict=True)
    return run(chosen, dict(chain.from_iterable(pairs)), "demo", "SmolLM2-135M-Instruct")


if __name__ == "__main__":
    raise SystemExit(main())
