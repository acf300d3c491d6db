"""One adaptive configuration over kinds of text, batch sizes, temperatures and prefix caches.

    python -m benchmarks.end_to_end.workloads --prompts DIR      # make bench-workloads PROMPTS=DIR

DIR holds one JSON lines file for each set of prompts. No speculation, fixed draft lengths and the
adaptive default answer every batch of prompts in turn, in an order that rotates: with an empty
prefix cache, and at once again with the prompts in it. An engine keeps what it has learned. A cell
is a set, a batch size and a temperature; the same command goes on where an earlier one was stopped.
Writes workloads.csv, prints how often the adaptive configuration is slower than the others.
"""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import chat_model
from benchmarks.cells import Table, read_sets
from benchmarks.common import RESULTS
from benchmarks.end_to_end.adaptive import chosen
from benchmarks.end_to_end.sources import DRAFT_LENGTH, NGRAM, SUFFIX, levels, missing
from vllm_hsd.cli.bench_runs import Engines, progress
from vllm_hsd.cli.options import integers, numbers
from vllm_hsd.engine import EngineProcess, Generation

PLAIN, ADAPTIVE = "no speculation", "adaptive"
SHORT_DRAFT_LENGTH = 3
CACHES = ("cold", "warm")
# Batches of a cell: small ones are over sooner and differ more.
FEWEST_PROMPTS = {1: 8, 4: 12}

Answers = dict[str, dict[str, list[Generation]]]


def configurations() -> dict[str, dict[str, Any] | None]:
    """No speculation, the best lookup with long and short fixed drafts, and adaptive."""
    lookup = SUFFIX if SUFFIX in levels() else NGRAM
    config = {"method": "hsd", "num_speculative_tokens": DRAFT_LENGTH, "levels": [lookup]}
    fixed = {**config, "adaptive": False}
    return {
        PLAIN: None,
        f"fixed {DRAFT_LENGTH}": fixed,
        f"fixed {SHORT_DRAFT_LENGTH}": {**fixed, "num_speculative_tokens": SHORT_DRAFT_LENGTH},
        ADAPTIVE: {**config, "adaptive": True},
    }


def answer(
    engine: EngineProcess, prompts: list[list[int]], params: dict[str, Any]
) -> dict[str, Generation]:
    """Answers with an empty prefix cache, and then with what they left in it."""
    engine.call(empty_prefix_cache)
    return {cache: engine.generate(prompts, params) for cache in CACHES}


def empty_prefix_cache(llm: Any) -> None:
    """Runs in the engine's process."""
    llm.reset_prefix_cache()


def measure_cell(
    engines: Engines,
    names: Sequence[str],
    prompt_ids: Sequence[list[int]],
    batch_size: int,
    params: dict[str, Any],
    turn: int,
) -> Answers:
    """By configuration and cache, the answers to every batch of the prompts.

    Args:
        turn: the configuration that begins.
    """
    found: Answers = {name: {cache: [] for cache in CACHES} for name in names}
    count = max(FEWEST_PROMPTS.get(batch_size, 0), batch_size)
    for part, first in enumerate(range(0, count, batch_size)):
        prompts = [prompt_ids[i % len(prompt_ids)] for i in range(first, first + batch_size)]
        for shift in range(len(names)):
            index = (turn + part + shift) % len(names)
            for cache, generation in answer(engines.get(index), prompts, params).items():
                found[names[index]][cache].append(generation)
    return found


def cell_rows(found: Answers, cell: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per cache and configuration; the spread is over batches."""
    rows = []
    for cache in CACHES:
        plain = found[PLAIN][cache]
        for name, by_cache in found.items():
            own = by_cache[cache]
            ratios = [b.seconds / a.seconds for a, b in zip(own, plain, strict=True)]
            rows.append(
                {
                    **cell,
                    "cache": cache,
                    "configuration": name,
                    "batches": len(own),
                    "tokens_per_second": sum(g.num_tokens for g in own) / _seconds(own),
                    "over_no_speculation": _seconds(plain) / _seconds(own),
                    "lowest": min(ratios),
                    "highest": max(ratios),
                    "first_token_over_no_speculation": _first_token(own) / _first_token(plain),
                    **chosen(own),
                }
            )
    return rows


def _seconds(answers: Sequence[Generation]) -> float:
    return sum(generation.seconds for generation in answers)


def _first_token(answers: Sequence[Generation]) -> float:
    return statistics.fmean(s for generation in answers for s in generation.first_token_seconds)


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A Markdown table by batch size, temperature and cache: means and extremes over the sets."""
    names = list(dict.fromkeys(row["configuration"] for row in rows))[1:]
    yield f"| batch size, temperature, cache | {' | '.join(names)} | adaptive: least of a set |"
    yield "| --- |" + " --- |" * (len(names) + 1)
    points = dict.fromkeys((row["batch_size"], row["temperature"], row["cache"]) for row in rows)
    for point in points:
        at = [row for row in rows if (row["batch_size"], row["temperature"], row["cache"]) == point]
        speeds = {
            name: [float(r["over_no_speculation"]) for r in at if r["configuration"] == name]
            for name in names
        }
        means = [f"{statistics.fmean(speeds[name]):.2f}" for name in names]
        where = f"{point[0]}, {float(point[1]):g}, {point[2]}"
        yield f"| {where} | {' | '.join(means)} | {min(speeds[ADAPTIVE]):.2f} |"


def shortfalls(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """How the adaptive configuration compares with no speculation and the best fixed one."""
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        key = (row["set"], row["batch_size"], row["temperature"], row["cache"])
        cells.setdefault(key, {})[row["configuration"]] = row
    own = [float(cell[ADAPTIVE]["over_no_speculation"]) for cell in cells.values()]
    best = [
        max(float(row["over_no_speculation"]) for name, row in cell.items() if name != ADAPTIVE)
        for cell in cells.values()
    ]
    first = [float(c[ADAPTIVE]["first_token_over_no_speculation"]) for c in cells.values()]
    shares = [a / b for a, b in zip(own, best, strict=True)]
    for what, values, bound in (
        ("over no speculation", own, 0.98),
        ("over the best of no speculation and fixed lengths", shares, 0.97),
    ):
        low = sum(value < bound for value in values)
        yield (
            f"adaptive {what}: mean {statistics.fmean(values):.3f}, least {min(values):.2f}, "
            f"below {bound} at {low} of {len(values)} points"
        )
    late = sum(value > 1.03 for value in first)
    yield (
        f"time to first token over no speculation: median {statistics.median(first):.3f}, "
        f"most {max(first):.2f}, above 1.03 at {late} of {len(first)} points"
    )


def main() -> int:
    parser = chat_model.options(__doc__, RESULTS / "workloads")
    parser.add_argument("--prompts", type=Path, required=True, help="directory of *.jsonl files")
    parser.add_argument("--batch-sizes", type=integers, default=[1, 4, 16, 64])
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 1.0])
    options = parser.parse_args()
    try:
        prompts, sets = read_sets(
            options.prompts, max([*options.batch_sizes, *FEWEST_PROMPTS.values()])
        )
    except ValueError as error:
        parser.error(f"--prompts: {error}")
    for sentence in missing():
        print(sentence)
    configs = configurations()
    comparison, setup = chat_model.compared(
        options,
        list(configs.values()),
        prompts,
        batch_sizes=options.batch_sizes,
        temperatures=options.temperatures,
        enable_prefix_caching=True,
    )
    table = Table(options.output / "workloads.csv")
    names = list(configs)
    with Engines(comparison, setup) as engines:
        for index in range(len(names)):
            engines.get(index)
        for temperature in options.temperatures:
            for batch_size in options.batch_sizes:
                for turn, (name, indices) in enumerate(sets.items()):
                    cell = {"set": name, "batch_size": batch_size, "temperature": temperature}
                    if table.has(**cell):
                        continue
                    params = {
                        "temperature": temperature,
                        "max_tokens": options.max_tokens,
                        "ignore_eos": True,
                    }
                    own = [setup.prompt_ids[i] for i in indices]
                    found = measure_cell(engines, names, own, batch_size, params, turn)
                    table.add(cell_rows(found, cell))
                    progress(f"{name}, batch size {batch_size}, temperature {temperature:g}")
    for lines in (summary(table.rows), shortfalls(table.rows)):
        print(*lines, sep="\n")
    print(f"Written: {table.path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
