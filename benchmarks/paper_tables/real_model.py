"""The papers' tables on a real chat model: draft lengths, temperatures, verifiers, sources.

    python -m benchmarks.paper_tables.real_model --prompts DIR     # make bench-real PROMPTS=DIR

DIR holds one JSON lines file for each set of prompts ("turns", of which the first is asked). The
configurations of a group and no speculation answer every prompt in turn, in an order that rotates.
A cell is a group, a set and a temperature; its rows are appended to real_model.csv when it is
done, and the same command goes on where an earlier one was stopped. Takes hours.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import chat_model
from benchmarks.cells import Table, read_sets
from benchmarks.common import RESULTS, saved_figure
from benchmarks.end_to_end.sources import (
    DRAFT_LENGTH,
    NGRAM_MODEL,
    SUFFIX,
    drafter,
    levels,
    sources,
)
from vllm_hsd.cli import bench, bench_report, greedy
from vllm_hsd.cli.bench_jobs import Comparison, Job, Results, Setup, config_name
from vllm_hsd.cli.bench_runs import Engines, compare_greedy, progress
from vllm_hsd.cli.options import integers, numbers
from vllm_hsd.engine import Generation

VERIFIERS = ("standard", "block")
TEMPERATURES = [0.0, 0.3, 0.6, 0.8, 1.0]
# Draft lengths of the papers' tables; sources are compared at a length that suits lookups too.
LENGTHS = [5, 10, 15]


@dataclass(frozen=True)
class Group:
    """Configurations that take turns, by name."""

    name: str
    configs: dict[str, dict[str, Any]]
    temperatures: Sequence[float]


def groups(
    level: dict[str, Any], lengths: Sequence[int], temperatures: Sequence[float]
) -> list[Group]:
    """All groups: the sources, and draft lengths at temperature 0 and above it.

    At temperature 0 both verifiers accept the same tokens, so one of them is measured there.

    Args:
        level: the drafter whose draft length varies.
    """
    sampled = [t for t in temperatures if t > 0]
    found = [
        Group(name, draft_lengths(level, lengths, verifiers), chosen)
        for name, verifiers, chosen in (
            ("draft lengths, greedy", VERIFIERS[-1:], [t for t in temperatures if t == 0]),
            ("draft lengths, sampled", VERIFIERS, sampled),
        )
        if chosen
    ]
    mixed = {config_name(config): config for config in sources()}
    ends = [t for t in temperatures if t in (0.0, 0.6, 1.0)] or list(temperatures)
    return [Group("sources", mixed, ends), *found, *_drawn_lookups([t for t in ends if t > 0])]


def _drawn_lookups(temperatures: Sequence[float]) -> list[Group]:
    """Lookups that propose one token, and a distribution, of the same store."""
    if SUFFIX not in levels() or not temperatures:
        return []
    base = {"method": "hsd", "num_speculative_tokens": DRAFT_LENGTH, "adaptive": False}
    configs = [
        {**base, "levels": [level]}
        for level in (SUFFIX, {"first_of": [NGRAM_MODEL]}, {"first_of": [SUFFIX, NGRAM_MODEL]})
    ]
    named = {config_name(config): config for config in configs}
    return [Group("one token or a distribution", named, temperatures)]


def draft_lengths(
    level: dict[str, Any], lengths: Sequence[int], verifiers: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Every length with every verifier, and the longest one with entropy-based stopping."""
    found = {
        f"{verifier} {length}": _config(level, length, verifier)
        for length in lengths
        for verifier in verifiers
    }
    if not {"ngram", "suffix"} & level.keys():
        stopping = {**level, "stopping": "entropy"}
        name = f"block {max(lengths)}, entropy-based stopping"
        found[name] = _config(stopping, max(lengths), "block")
    return found


def _config(level: dict[str, Any], length: int, verifier: str) -> dict[str, Any]:
    return {
        "method": "hsd",
        "adaptive": False,
        "num_speculative_tokens": length,
        "levels": [level],
        "verifier": verifier,
    }


def measure_group(
    base: Comparison, group: Group, sets: dict[str, list[int]], table: Table
) -> list[str]:
    """Measure the cells of a group that are missing.

    Args:
        sets: indices of the prompts of each set.

    Returns:
        a sentence for every greedy difference that is no near tie of the target.
    """
    cells = [
        (name, temperature)
        for temperature in group.temperatures
        for name in sets
        if not table.has(group=group.name, set=name, temperature=temperature)
    ]
    if not cells:
        return []
    comparison = replace(base, configs=[None, *group.configs.values()])
    setup = bench.inspect(comparison)
    faults = []
    with Engines(comparison, setup) as engines:
        for index in range(len(comparison.configs)):
            engines.get(index)
        for name, temperature in cells:
            results = measure_cell(comparison, setup, engines, sets[name], temperature)
            rows = cell_rows(results, group, name, temperature, setup.dtype)
            table.add(rows)
            wrong = greedy.unexplained(results.differences, setup.dtype)
            faults += greedy.sentences(results, wrong, setup.dtype)
            best = max(rows[1:], key=lambda row: row["speedup"])
            progress(
                f"{group.name}, {name}, temperature {temperature:g}: best {best['configuration']}, "
                f"{best['speedup']:.2f} times, {best['tokens_per_step']:.2f} tokens per step"
            )
    return faults


def measure_cell(
    comparison: Comparison,
    setup: Setup,
    engines: Engines,
    prompts: Sequence[int],
    temperature: float,
) -> Results:
    """Answers of all configurations to one set of prompts."""
    results = Results(comparison)
    count = len(comparison.configs)
    for part, prompt in enumerate(prompts):
        for shift in range(count):
            index = (part + shift) % count
            params = {
                "temperature": temperature,
                "max_tokens": comparison.max_tokens,
                "ignore_eos": True,
                "seed": part,
            }
            found = engines.get(index).generate([setup.prompt_ids[prompt]], params)
            results.generations[Job(index, 0, 1, temperature, part, (prompt,))] = found
    compare_greedy(results, setup, engines)
    return results


def cell_rows(
    results: Results, group: Group, name: str, temperature: float, dtype: str
) -> list[dict[str, Any]]:
    """A row per configuration; the spread of a speed-up is its quartiles over prompts."""
    plain = _of(results, 0)
    rows = []
    for index, configuration in enumerate(["no speculation", *group.configs]):
        own = _of(results, index)
        speedups = [b.seconds / a.seconds for a, b in zip(own, plain, strict=True)]
        quarters = statistics.quantiles(speedups, n=4) if len(own) > 1 else speedups * 3
        gaps = [each.gap for each in results.differences if each.job.config == index]
        rows.append(
            {
                "group": group.name,
                "set": name,
                "temperature": temperature,
                "configuration": configuration,
                "prompts": len(own),
                "tokens_per_second": sum(g.num_tokens for g in own) / sum(g.seconds for g in own),
                "speedup": sum(g.seconds for g in plain) / sum(g.seconds for g in own),
                "speedup_quarter1": quarters[0],
                "speedup_quarter3": quarters[2],
                "tokens_per_step": bench_report.tokens_per_step(own) or 1.0,
                "accepted": " ".join(
                    "-" if rate is None else f"{rate:.3f}" for rate in bench_report.acceptance(own)
                ),
                "greedy_differences": "" if temperature else len(gaps),
                "largest_gap": max(gaps, default=""),
                "dtype": dtype,
                "max_tokens": results.comparison.max_tokens,
            }
        )
    return rows


def _of(results: Results, index: int) -> list[Generation]:
    return [found for job, found in results.generations.items() if job.config == index]


def means(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A Markdown table for every group and measure: configurations by temperature, mean of sets."""
    for group in dict.fromkeys(row["group"] for row in rows):
        own = [row for row in rows if row["group"] == group]
        temperatures = sorted({row["temperature"] for row in own}, key=float)
        for measure, title in (("tokens_per_step", "tokens per step"), ("speedup", "speed-up")):
            yield f"\n{group}, {title}, mean of {len({row['set'] for row in own})} sets\n"
            yield f"| configuration | {' | '.join(f'{float(t):g}' for t in temperatures)} |"
            yield "| --- |" + " --- |" * len(temperatures)
            for name in dict.fromkeys(row["configuration"] for row in own):
                cells = [f"{_mean(own, name, t, measure):.2f}" for t in temperatures]
                yield f"| {name} | {' | '.join(cells)} |"


def _mean(rows: Sequence[dict[str, Any]], name: str, temperature: str, measure: str) -> float:
    return statistics.fmean(
        float(row[measure])
        for row in rows
        if (row["configuration"], row["temperature"]) == (name, temperature)
    )


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Mean of the sets against the temperature: tokens per step above, speed-up below."""
    found = list(dict.fromkeys(row["group"] for row in rows))
    with saved_figure(path, 4 * len(found), 7) as figure:
        panels = figure.subplots(2, len(found), sharex=True, sharey="row", squeeze=False)
        for column, group in enumerate(found):
            own = [row for row in rows if row["group"] == group]
            temperatures = sorted({row["temperature"] for row in own}, key=float)
            for name in list(dict.fromkeys(row["configuration"] for row in own))[1:]:
                for axes, measure in zip(
                    panels[:, column], ("tokens_per_step", "speedup"), strict=True
                ):
                    values = [_mean(own, name, t, measure) for t in temperatures]
                    axes.plot([float(t) for t in temperatures], values, marker="o", label=name)
            panels[0][column].set_title(group, fontsize=9)
            panels[0][column].legend(fontsize=7)
            panels[1][column].axhline(1, color="gray", linewidth=0.8)
            panels[1][column].set_xlabel("temperature")
        panels[0][0].set_ylabel("tokens per target step")
        panels[1][0].set_ylabel("speed-up over no speculation")
        figure.suptitle(f"{rows[0]['dtype']}, {rows[0]['machine']}", fontsize=8)


def main() -> int:
    parser = chat_model.options(__doc__, RESULTS / "real_model")
    parser.add_argument("--prompts", type=Path, required=True, help="directory of *.jsonl files")
    parser.add_argument("--drafter", type=json.loads, help="level (default: the head)")
    parser.add_argument("--num-prompts", type=int, default=20, help="of every set")
    parser.add_argument("--lengths", type=integers, default=LENGTHS)
    parser.add_argument("--temperatures", type=numbers, default=TEMPERATURES)
    options = parser.parse_args()
    try:
        prompts, sets = read_sets(options.prompts, options.num_prompts)
    except ValueError as error:
        parser.error(f"--prompts: {error}")
    base, _ = chat_model.compared(options, [None], prompts, temperatures=options.temperatures)
    table = Table(options.output / "real_model.csv")
    faults = []
    for group in groups(options.drafter or drafter(), options.lengths, options.temperatures):
        faults += measure_group(base, group, sets, table)
    for line in means(table.rows):
        print(line)
    plot(table.rows, options.output / "real_model.png")
    print(f"\nWritten: {table.path}, {options.output / 'real_model.png'}")
    for line in faults:
        print(line)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
