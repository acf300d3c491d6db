"""Configurations take turns on the same prompts: cells, rows of one schema, resumed where stopped.

A study is a table of groups; a group's cells are set x batch size x temperature. In a cell, every
batch of prompts is answered by no speculation and by all configurations of the group, one after
the other in an order that rotates, so that what slows the machine down slows all of them.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.columns import Table, chosen, counts, interval, latencies, times
from benchmarks.models.smollm2 import smollm2
from vllm_hsd.errors import UserError
from vllm_hsd.tools.cli import bench, bench_quality, greedy
from vllm_hsd.tools.cli.bench_jobs import Comparison, Job, Results, Setup
from vllm_hsd.tools.cli.bench_runs import Engines, compare_greedy
from vllm_hsd.tools.cli.options import progress
from vllm_hsd.tools.engine import EngineProcess, Generation
from vllm_hsd.tools.machine_load import CpuTimes
from vllm_hsd.tools.planner.prompts import read_prompts
from vllm_hsd.tools.planner.public_sets import EAGLE_SETS

PLAIN, MIX = "no speculation", "all in turn"
# Spreads the lengths of answers.
STRIDE = 37
Config = dict[str, Any] | None


@dataclass
class Cell:
    """What the configurations of a group answer in turn.

    Attributes:
        batches: indices of prompts, a batch after the other.
        streams: of a batch's requests, how many are under way at a time; 0: all arrive at once.
        found: answers by configuration (by index).
    """

    group: str
    set: str
    batches: list[tuple[int, ...]]
    temperature: float
    streams: int = 0
    found: dict[int, list[Generation]] = field(default_factory=dict)

    @property
    def key(self) -> dict[str, Any]:
        """Columns that tell the cell apart."""
        return {
            "group": self.group,
            "set": self.set,
            "batch_size": self.streams or len(self.batches[0]),
            "temperature": self.temperature,
        }


@dataclass(frozen=True)
class Group:
    """Configurations that take turns, by name, and where.

    Attributes:
        batch_sizes: of requests that arrive at once, of one set.
        streams: by the number of requests under way at a time, those of all sets, in batches.
    """

    name: str
    configs: Mapping[str, Config]
    temperatures: Sequence[float]
    batch_sizes: Sequence[int] = (1,)
    streams: Mapping[int, Sequence[tuple[int, ...]]] = field(default_factory=dict)

    def cells(self, sets: Mapping[str, Sequence[int]]) -> Iterator[Cell]:
        """Every temperature, batch size and set; prompts repeat where a set has too few. Then its
        streams."""
        for temperature in self.temperatures:
            for size in self.batch_sizes:
                for name, indices in sets.items():
                    batches = [
                        tuple(indices[i % len(indices)] for i in range(first, first + size))
                        for first in range(0, len(indices), size)
                    ]
                    yield Cell(self.name, name, batches, temperature)
            for count, parts in self.streams.items():
                yield Cell(self.name, MIX, list(parts), temperature, count)


class Sweep:
    """Engines that answer cells, and the rows of their answers.

    Args:
        names: of the configurations; the first one is no speculation.
    """

    def __init__(
        self,
        names: Sequence[str],
        comparison: Comparison,
        setup: Setup,
        engines: Engines,
        *,
        ignore_eos: bool = True,
    ) -> None:
        self.names, self.setup, self.engines = names, setup, engines
        self.params = {"max_tokens": comparison.max_tokens, "ignore_eos": ignore_eos}
        self.results = Results(comparison, metadata=bench.describe(comparison, setup))
        self._compared: set[Job] = set()
        self._last: EngineProcess | None = None

    def answer(
        self,
        cell: Cell,
        part: int,
        turn: int = 0,
        on_text: Callable[[int, str], None] | None = None,
        on_answer: Callable[[int, Generation], None] | None = None,
    ) -> None:
        """Every configuration answers one batch of a cell.

        Args:
            turn: the configuration that begins with the cell's first batch.
            on_text: takes the configuration and what is new of its answer.
        """
        batch, count = cell.batches[part], len(self.names)
        prompts = [self.setup.prompt_ids[i] for i in batch]
        params = {**self.params, "temperature": cell.temperature}
        for shift in range(count):
            index = (turn + part + shift) % count
            engine = self.engines.get(index)
            if engine is not self._last:
                # The first pass after another engine's is slower, not for those that share one.
                engine.generate([prompts[0][:8]], {"max_tokens": 2, "ignore_eos": True})
            self._last = engine
            show = [lambda _, text, i=index: on_text(i, text)] if on_text else []
            before = CpuTimes.now()
            if cell.streams:
                found = serve(engine, prompts, cell.streams, params)
            else:
                found = engine.generate(prompts, params, *show)
            cell.found.setdefault(index, []).append(found)
            if on_answer:
                on_answer(index, found)
            # A larger batch rounds differently: what its answers share is for the tests.
            if len(batch) == 1:
                job = Job(index, 0, 1, cell.temperature, batch[0], batch)
                bench_quality.record(self.results, job, found, before)

    def compare(self) -> list[str]:
        """Greedy answers that were not compared yet: sentences about those that are no near ties.

        Raises:
            UserError: the engine without speculation failed.
        """
        fresh = {
            job: found
            for job, found in self.results.generations.items()
            if job not in self._compared
        }
        results = replace(self.results, generations=fresh, differences=[])
        compare_greedy(results, self.setup, self.engines)
        self._compared |= fresh.keys()
        self.results.differences += results.differences
        wrong = greedy.unexplained(results.differences, self.setup.dtype)
        return greedy.sentences(results, wrong, self.setup.dtype)

    def rows(self, cells: Sequence[Cell], **changed: Any) -> list[dict[str, Any]]:
        """A row for every configuration, over all batches of the cells.

        Args:
            changed: columns in place of those of the first cell.
        """
        rows = []
        eager = self.results.comparison.engine_args.get("enforce_eager", False)
        plain = [found for cell in cells for found in cell.found[0]]
        for index, name in enumerate(self.names):
            own = [found for cell in cells for found in cell.found[index]]
            rows.append(
                {
                    **cells[0].key,
                    **changed,
                    "configuration": name,
                    **times(own, plain),
                    **chosen(own),
                    **counts(own),
                    **interval(own, plain),
                    **latencies(own),
                    **self._differences(cells, index),
                    "dtype": self.setup.dtype,
                    "max_tokens": self.params["max_tokens"],
                    "engine": engine_of(eager),
                }
            )
        return rows

    def _differences(self, cells: Sequence[Cell], index: int) -> dict[str, Any]:
        batches = {batch for cell in cells for batch in cell.batches if len(batch) == 1}
        if cells[0].temperature > 0 or not batches:
            return {}
        gaps = [
            each.gap
            for each in self.results.differences
            if each.job.config == index and each.job.prompts in batches
        ]
        return {"greedy_differences": len(gaps), "largest_gap": max(gaps, default="")}


def serve(
    engine: EngineProcess, prompts: Sequence[Any], streams: int, params: Mapping[str, Any]
) -> Generation:
    """Answer every prompt, `streams` at a time: as one ends, the next one starts.

    Answers differ in length, by their number: those of one length begin and end together for ever
    without speculation, and all prompts share a step then.

    Args:
        params: arguments of `vllm.SamplingParams`; `max_tokens` is the mean.
    """
    mean = params["max_tokens"]
    each = [
        {**params, "max_tokens": mean // 2 + 1 + STRIDE * number % mean}
        for number in range(len(prompts))
    ]
    return engine.generate(prompts, each, max_concurrency=streams)


def options(
    description: str, output: Path, sets: bool = False, model: bool = True
) -> argparse.ArgumentParser:
    """A parser with the options of every study of the chat model.

    Args:
        description: docstring of the study; its first line is shown.
        output: default directory of the results.
        sets: also the option that names a directory of prompts.
        model: also the one that names the model.
    """
    parser = common.options(description, output)
    if model:
        default = "SmolLM2, converted on demand"
        parser.add_argument("--model", help=f"name or directory (default: {default})")
    parser.add_argument("--max-tokens", type=int, default=64)
    dtypes = "auto", "bfloat16", "float16", "float32"
    parser.add_argument("--dtype", default="auto", choices=dtypes)
    parser.add_argument(
        "--compiled", action="store_true", help="engines as they are served, minutes to start"
    )
    if sets:
        parser.add_argument(
            "--prompts",
            type=Path,
            help="directory of *.jsonl files, one per set (default: the public ones, fetched)",
        )
        parser.add_argument("--num-prompts", type=int, default=20, help="of every set")
    return parser


def read_sets(
    directory: Path | None, count: int | None = None
) -> tuple[list[Any], dict[str, list[int]]]:
    """The first prompts of every `*.jsonl` file, or of EAGLE's public sets, and each one's indices.

    Raises:
        UserError: a file is no prompts file.
        SystemExit: there is none.
    """
    prompts: list[Any] = []
    sets: dict[str, list[int]] = {}
    for file in sorted(directory.glob("*.jsonl")) if directory else map(Path, EAGLE_SETS):
        own = read_prompts(file)[:count]
        sets[file.stem] = list(range(len(prompts), len(prompts) + len(own)))
        prompts += own
    if not prompts:
        raise SystemExit(f"--prompts: {directory} holds no .jsonl file")
    return prompts, sets


@contextmanager
def started(
    chosen: argparse.Namespace,
    configs: Mapping[str, Config],
    prompts: Sequence[Any],
    *,
    temperatures: Sequence[float],
    batch_sizes: Sequence[int] = (1,),
    ignore_eos: bool = True,
    engines_class: type[Engines] = Engines,
    **engine_args: Any,
) -> Iterator[Sweep]:
    """No speculation and the configurations, checked; engines load when they are first used.

    Args:
        chosen: values of `options`; a dtype that was probed is kept in them.
        engines_class: how the engines are hosted.
        engine_args: further ones, of `vllm.LLM`.

    Raises:
        SystemExit: with a sentence: vLLM refuses the model or a configuration, or one fails.
    """
    comparison = Comparison(
        # Results name the model: a relative path says nothing about the machine.
        model=chosen.model or os.path.relpath(smollm2()),
        configs=[None, *configs.values()],
        prompts=list(prompts),
        batch_sizes=list(batch_sizes),
        temperatures=list(temperatures),
        max_tokens=chosen.max_tokens,
        num_prompts=len(prompts),
        rounds=1,
        engine_args={"dtype": chosen.dtype, "enforce_eager": not chosen.compiled, **engine_args},
        output=chosen.output,
    )
    try:
        comparison, setup = bench.prepare(comparison)
        chosen.dtype = setup.dtype
        if setup.device != "cpu":
            raise UserError(
                "engines take turns on the memory of a host here: on this device use `vllm-hsd "
                "bench`, or `make EXTRA=cpu` in a clone without .venv."
            )
        with engines_class(comparison, setup) as engines:
            yield Sweep([PLAIN, *configs], comparison, setup, engines, ignore_eos=ignore_eos)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def engine_of(eager: bool) -> str:
    """What the column says of an engine."""
    return "eager" if eager else "compiled"


def fill(
    table: Table,
    groups: Sequence[Group],
    chosen: argparse.Namespace,
    prompts: Sequence[Any],
    sets: Mapping[str, Sequence[int]],
    **engines: Any,
) -> list[str]:
    """Measure the cells that the table does not have; takes hours, goes on where it was stopped.

    Args:
        engines: how they are hosted and their further arguments, see `started`.

    Returns:
        a sentence for every greedy difference that is no near tie of the target.
    """
    faults: list[str] = []
    size = {"max_tokens": chosen.max_tokens, "engine": engine_of(not chosen.compiled)}
    size |= {"dtype": chosen.dtype} if chosen.dtype != "auto" else {}
    for group in groups:
        names = PLAIN, *group.configs
        cells = [
            cell
            for cell in group.cells(sets)
            if not all(
                table.has(**cell.key, **size, configuration=name, batches=len(cell.batches))
                for name in names
            )
        ]
        if not cells:
            continue
        with started(
            chosen,
            group.configs,
            prompts,
            temperatures=group.temperatures,
            batch_sizes=[*group.batch_sizes, *group.streams],
            **engines,
        ) as sweep:
            for index in range(len(sweep.names)):
                sweep.engines.get(index)
            for turn, cell in enumerate(cells):
                for part in range(len(cell.batches)):
                    sweep.answer(cell, part, turn)
                faults += sweep.compare()
                rows = sweep.rows([cell])
                table.add(rows)
                best = max(rows, key=lambda row: row["speedup"])
                where = ", ".join(f"{name} {value}" for name, value in cell.key.items() if value)
                progress(f"{where}: best {best['configuration']}, {best['speedup']:.2f} times")
    return faults
