"""Every speed that docs/results.md leads with, by one script: `make results`.

    python -m benchmarks.results --prompts DIR      # hours; goes on where it was stopped
    python -m benchmarks.results --tables           # those of the page, as Markdown

Configurations of a group take turns on each prompt, engines compiled as they are served: no
speculation, vLLM's own methods, single drafters, cascades, and what is drafted by default. Prompts:
SETS, of DIR or fetched, and edits of functions and of files (`studies.edits`). With several
streams, one request follows the other, of all sets in turn, no prompt twice but edits.
"""

import itertools
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plot, sweep
from benchmarks.columns import Table
from benchmarks.common import RESULTS
from benchmarks.models.quantize import int8_copy
from benchmarks.models.qwen_coder import qwen_coder
from benchmarks.models.smollm2 import smollm2
from benchmarks.shared_engines import SharedEngines
from benchmarks.studies import edits
from benchmarks.studies.configs import EAGLE3, NGRAM, SUFFIX, fixed, vllms_own
from benchmarks.sweep import MIX, PLAIN, Config, Group
from vllm_hsd.tools.cli.bench_runs import Engines
from vllm_hsd.tools.cli.options import integers, numbers
from vllm_hsd.tools.planner.prompts import prompts_file

SETS = "humaneval", "mt_bench", "gsm8k", "sum", "qa"
TABLE = RESULTS / "results.csv"
# Where the rows of the page lie.
PAGE = Path(__file__).parent
PLACES = 1, 2, 4, 8
# With several streams: parts of a run, requests of each and stream, of each at least.
PARTS, REQUESTS, FEWEST = 4, 2.5, 20
MEANS = "tokens a step", f"accepted at {', '.join(map(str, PLACES))}", "TTFT", "TPOT"
FAMILY, SMALL = "Qwen2.5-Coder 1.5B", "SmolLM2 135M"
SMALL_BRANCHES = f"{SMALL}, branches"
FAMILY_INT8 = f"{FAMILY}, 8-bit drafter"
FAMILY_PEER, FAMILY_SOURCES = f"{FAMILY}, vLLM's", f"{FAMILY}, sources"
FAMILY_PLANNED = f"{FAMILY}, planned"
# Those with several streams: of the family two engines, whose caches take the memory of others.
FAMILY_STREAMS = f"{FAMILY}, under load"


def family(name: str, drafter: Path) -> dict[str, Config]:
    """A lookup and a drafter, alone and as a cascade; one engine serves all of fixed lengths."""
    small = {"model": os.path.relpath(drafter)}
    return {
        f"suffix 8 < {name} 8": fixed({"suffix": {}, "num_tokens": 8}, small, length=8),
        f"{name} 3": fixed(small, length=3),
        "suffix 8": fixed({"suffix": {}}, length=8),
        **adaptive(name, small["model"]),
    }


def planned() -> dict[str, Config]:
    """What `planner.check_predictions` chose of all prompts of the demo, and the drafters that it
    expects to be fastest alone, of all and of edits, at temperature 0 (lengths 4) and 1 (3): to be
    named by `--only`; next to fixed lengths of no plan."""
    small = {"model": os.path.relpath(qwen_coder("0.5B"))}
    return {
        "suffix 8 < 0.5B 8": fixed({"suffix": {}, "num_tokens": 8}, small, length=8),
        "suffix 3 < 0.5B 4": fixed({"suffix": {}, "num_tokens": 3}, small, length=4),
        "0.5B 4": fixed(small, length=4),
        "suffix 2 < 0.5B 3": fixed({"suffix": {}, "num_tokens": 2}, small, length=3),
        "0.5B 3": fixed(small, length=3),
        "suffix 8": fixed({"suffix": {}}, length=8),
        **adaptive("0.5B", small["model"]),
    }


def peer() -> dict[str, Config]:
    """vLLM's own method with the 0.5B, and ours, apart: four targets take too much memory."""
    model = os.path.relpath(qwen_coder("0.5B"))
    own = {"method": "draft_model", "num_speculative_tokens": 3, "model": model}
    return {"vLLM's draft_model 3, 0.5B": own, **adaptive("0.5B", model)}


def adaptive(name: str, model: str) -> dict[str, Config]:
    """A lookup below a drafter, lengths chosen while serving."""
    levels: list[dict[str, Any]] = [{"suffix": {}, "num_tokens": 8}, {"model": model}]
    return {f"suffix < {name}, adaptive": fixed(*levels, length=8, adaptive=True)}


def sources() -> dict[str, Config]:
    """A lookup next to the 0.5B, the better offer of each step, and the lookup below it."""
    model = os.path.relpath(qwen_coder("0.5B"))
    together = {"sources": [{"suffix": {}}, {"model": model}]}
    return {
        "suffix or 0.5B, adaptive": fixed(together, length=8, adaptive=True),
        **adaptive("0.5B", model),
    }


def smollm() -> dict[str, Config]:
    """vLLM's own methods, a lookup with a store and a head: alone, and next to each other."""
    return {
        **vllms_own(),
        "suffix 8": fixed(SUFFIX, length=8),
        "eagle3 3": fixed(EAGLE3, length=3),
        "suffix, adaptive": fixed(SUFFIX, adaptive=True),
        "suffix or eagle3, adaptive": fixed({"sources": [SUFFIX, EAGLE3]}, adaptive=True),
    }


def branches() -> dict[str, Config]:
    """The best offer of two lookups, and the best four together."""
    together = {"sources": [SUFFIX, NGRAM]}
    return {
        f"suffix or ngram, {rows} together": fixed({**together, "branches": rows}, adaptive=True)
        for rows in (1, 4)
    }


GROUPS: dict[str, Callable[[], dict[str, Config]]] = {
    FAMILY: lambda: family("0.5B", qwen_coder("0.5B")),
    FAMILY_INT8: lambda: family("8-bit 0.5B", int8_copy(qwen_coder("0.5B"))),
    SMALL: smollm,
    SMALL_BRANCHES: branches,
    FAMILY_PEER: peer,
    FAMILY_SOURCES: sources,
    FAMILY_PLANNED: planned,
    FAMILY_STREAMS: lambda: adaptive("0.5B", os.path.relpath(qwen_coder("0.5B"))),
}
# Whose tables docs/results.md shows, above temperature 0 with one request.
SHOWN = FAMILY, FAMILY_PEER, FAMILY_STREAMS, SMALL
# Whose engine without speculation and that of fixed lengths serve several configurations.
SHARED = FAMILY, FAMILY_INT8, FAMILY_PLANNED


def in_turn(
    sets: Sequence[Sequence[int]], streams: Sequence[int]
) -> dict[int, list[tuple[int, ...]]]:
    """By requests under way at a time: prompts of all sets in turn, in PARTS; a set that ends
    begins again."""
    found = {}
    prompts = (own[n % len(own)] for n in itertools.count() for own in sets)
    for count in streams:
        size = max(FEWEST, math.ceil(count * REQUESTS))
        found[count] = [tuple(itertools.islice(prompts, size)) for _ in range(PARTS)]
    return found


def tables(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Lines of Markdown: speed-ups of a group by set, and what else was measured of them."""
    for key in dict.fromkeys(_cell(row) for row in rows):
        own = [row for row in rows if _cell(row) == key]
        sets = list(dict.fromkeys(row["set"] for row in own))
        names = list(dict.fromkeys(row["configuration"] for row in own))
        group, size, temperature, follow_each_other = key
        once = "max_tokens", "dtype", "engine", "machine", "commit"
        tokens, *run = (_different(row[name] for row in own) for name in once)
        batches = _different(row["batches"] for row in own)
        load, counted = f"batch {size}", f"{batches} answers of each set x {tokens} tokens"
        if follow_each_other:
            load = f"{size} streams"
            counted = f"{batches} parts, {tokens} tokens an answer in the mean"
        where = "{}, {}, {}, commit {}".format(*run)
        yield f"**{group}, {load}, temperature {float(temperature):g}** ({counted}; {where})"
        yield ""
        columns = [*(["all"] if len(sets) > 1 else []), *sets, *MEANS]
        yield f"| over no speculation | {' | '.join(columns)} |"
        yield "| ---" * (1 + len(columns)) + " |"
        for name in names:
            found = {row["set"]: row for row in own if row["configuration"] == name}
            # One of a run that was stopped has no mean yet.
            if len(found) == len(sets):
                yield f"| {name} | {' | '.join(_figures(found, sets))} |"
        yield ""


def shown(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Those that docs/results.md has as tables; of the others it says what they say."""
    return [
        row
        for row in rows
        if row["group"] in SHOWN and (row["set"] != MIX or float(row["temperature"]) == 0)
    ]


def _cell(row: Mapping[str, str]) -> tuple[str, str, str, bool]:
    """Of a table; one stream is no batch of one."""
    return row["group"], row["batch_size"], row["temperature"], row["set"] == MIX


def _different(values: Iterable[str]) -> str:
    """Each once: cells of a table may have been measured at different times."""
    return " and ".join(dict.fromkeys(values))


def _figures(rows: Mapping[str, Mapping[str, str]], sets: Sequence[str]) -> Iterator[str]:
    """Cells of a configuration's line: speed-ups, then means of the sets."""

    def of(column: str) -> list[float]:
        return [float(rows[name][column]) for name in sets if rows[name][column]]

    if len(sets) > 1:
        mean = statistics.geometric_mean(of("speedup"))
        # Half widths of the sets' intervals, which are independent, on a log scale.
        ends = zip(of("ci_low"), of("ci_high"), strict=True)
        widths = (math.log(high / low) / 2 for low, high in ends)
        width = math.hypot(*widths) / len(sets)
        between = f" ({mean * math.exp(-width):.2f}-{mean * math.exp(width):.2f})" if width else ""
        yield f"{mean:.2f}" + between
    for name in sets:
        low, high = (f"{float(rows[name][column]):.2f}" for column in ("ci_low", "ci_high"))
        # Neither no speculation nor a single batch has one.
        yield f"{float(rows[name]['speedup']):.2f}" + (f" ({low}-{high})" if low != high else "")
    yield f"{statistics.fmean(of('tokens_per_step')):.2f}"
    # A set whose drafts were shorter accepted nothing further on.
    shares = [list(map(float, rows[name]["by_place"].split())) for name in sets]
    longest = max(map(len, shares))
    at = [p for p in PLACES if p <= longest]
    means = (statistics.fmean(own[p - 1] if p <= len(own) else 0.0 for own in shares) for p in at)
    yield " ".join(f"{mean:.2f}" for mean in means)
    yield f"{statistics.fmean(of('ttft_p50_ms')) / 1e3:.2f} s"
    median, most = (statistics.fmean(of(f"tpot_p{each}_ms")) for each in (50, 99))
    yield f"{median:.0f}, {most:.0f} ms"


def draw(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """The family's speed-ups by set, with 95 % intervals; vLLM's own drafter next to them."""
    own = [
        {
            **row,
            "temperature": f"{float(row['temperature']):g}, {row['machine'].rsplit(', ', 1)[0]}",
            "speedup_low": row["ci_low"],
            "speedup_high": row["ci_high"],
        }
        for row in rows
        if row["group"] in (FAMILY, FAMILY_PEER) and row["configuration"] != PLAIN
    ]
    if not own:
        return
    # A configuration may be in two groups of one machine: the first one's is drawn.
    bars: dict[tuple[str, ...], dict[str, str]] = {}
    for row in own:
        bars.setdefault((row["temperature"], row["set"], row["configuration"]), row)
    title = f"{FAMILY} over no speculation, {own[0]['dtype']}, batch 1"
    own = list(bars.values())
    plot.bars(own, path, x="set", panel="temperature", measure="speedup", title=title)


def main() -> int:
    parser = sweep.options(__doc__, TABLE.parent, sets=True, model=False)
    parser.set_defaults(max_tokens=128, num_prompts=10, compiled=True)
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 1.0])
    parser.add_argument("--streams", type=integers, default=[4, 16], help="requests at a time")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS))
    parser.add_argument("--only", nargs="+", help="names of configurations")
    parser.add_argument("--sets", nargs="+", help="names of sets, with one request")
    parser.add_argument("--tables", action="store_true", help="print those of the page and end")
    options = parser.parse_args()
    here = PAGE if options.tables and options.output == TABLE.parent else options.output
    table = Table(here / TABLE.name)
    if options.tables:
        print(*tables(shown(table.rows)), sep="\n")
        return 0
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        for each in SETS:
            here = options.prompts / f"{each}.jsonl" if options.prompts else prompts_file(each)
            shutil.copy(here, Path(directory, f"{each}.jsonl"))
        edits.write(Path(directory))
        few, every = (sweep.read_sets(Path(directory), n) for n in (options.num_prompts, None))
    unknown = set(options.sets or ()) - every[1].keys()
    if unknown:
        parser.error(f"--sets: {', '.join(sorted(unknown))}: choose from {', '.join(every[1])}")
    for name in options.groups:
        configs = GROUPS[name]()
        chosen = {k: v for k, v in configs.items() if not options.only or k in options.only}
        small = name in (SMALL, SMALL_BRANCHES)
        options.model = os.path.relpath(smollm2() if small else qwen_coder("1.5B"))
        prompts, sets = few
        streams: dict[int, list[tuple[int, ...]]] = {}
        # The longest prompt decides which texts an engine has room for: no other group needs all.
        if name in (SMALL, FAMILY_STREAMS):
            prompts, sets = every
            streams = in_turn(list(sets.values()), options.streams)
            one = options.num_prompts if name == SMALL else 0
            sets = {key: indices[:one] for key, indices in sets.items() if one}
        sets = {key: own for key, own in sets.items() if key in (options.sets or sets)}
        faults += sweep.fill(
            table,
            [Group(name, chosen, options.temperatures, streams=streams)],
            options,
            prompts,
            sets,
            engines_class=SharedEngines if name in SHARED else Engines,
            kv_cache_memory_bytes=1 << (29 if streams else 28),
        )
    figure = table.path.with_suffix(".png")
    draw(table.rows, figure)
    print(*tables(table.rows), f"Written: {table.path}, {figure}", *faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
