"""A load that swings between one stream and many: no speculation, fixed drafts, adaptive drafts.

    python -m benchmarks.end_to_end.adaptive        # or `make bench-adaptive`; about 20 minutes

SmolLM2-135M-Instruct answers the prompts of the demo. A phase keeps a number of streams busy for a
minute: what comes right after a shift counts. The engines take turns in every phase, and each keeps
what it has learned from one phase to the next. Writes adaptive.csv and adaptive.png: tokens per
second and median time per token over those of no speculation, and what was chosen: mean draft
length and the share of steps without a draft, per request.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import chat_model
from benchmarks.common import RESULTS, commit, saved_figure, write_csv
from benchmarks.end_to_end.demo import read_demo_prompts
from benchmarks.end_to_end.sources import DRAFT_LENGTH, levels, missing
from benchmarks.end_to_end.streams import Served, keep_streams
from vllm_hsd.cli import bench
from vllm_hsd.cli.bench_runs import Engines, progress
from vllm_hsd.cli.options import integers
from vllm_hsd.engine import Generation


def configurations() -> dict[str, dict[str, Any] | None]:
    """No speculation; the best lookup with fixed drafts; the same, and all sources, adaptive."""
    lookup = [level for level in levels() if "eagle3" not in level][-1]
    fixed = {
        "method": "hsd",
        "adaptive": False,
        "num_speculative_tokens": DRAFT_LENGTH,
        "levels": [lookup],
    }
    mixed = {**fixed, "levels": [{"first_of": levels()}]}
    kind = next(iter(lookup))
    return {
        "no speculation": None,
        f"{kind}, fixed": fixed,
        f"{kind}, adaptive": {**fixed, "adaptive": True},
        "all sources, adaptive": {**mixed, "adaptive": True},
    }


def measure(
    engines: Engines, names: Sequence[str], prompt_ids: list[list[int]], options: Any
) -> list[dict[str, Any]]:
    """A row per phase and configuration."""
    rows = []
    params = {
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
        "ignore_eos": True,
    }
    for phase, streams in enumerate(options.streams):
        served: dict[str, Served] = {}
        for shift in range(len(names)):
            index = (phase + shift) % len(names)
            served[names[index]] = engines.get(index).call(
                keep_streams, prompt_ids, streams, options.seconds, params
            )
        plain = served[names[0]]
        for name in names:
            own = served[name]
            rows.append(
                {
                    "phase": phase,
                    "streams": streams,
                    "temperature": options.temperature,
                    "configuration": name,
                    "tokens_per_second": _rate(own),
                    "over_no_speculation": _rate(own) / _rate(plain),
                    "per_token_over_no_speculation": statistics.median(own.per_token)
                    / statistics.median(plain.per_token),
                    **chosen([own]),
                }
            )
            progress(
                f"phase {phase + 1} of {len(options.streams)}, {streams} streams, {name}: "
                f"{rows[-1]['over_no_speculation']:.2f}"
            )
    return rows


def chosen(served: Sequence[Served | Generation]) -> dict[str, float]:
    """Mean draft length and the share of drafts without a token, NaN without speculation."""
    tops = [each.levels[-1] for each in served if each.levels]
    requested = sum(level["requested"] for level in tops)
    names = {"draft_length": "drafted", "no_draft": "empty"}
    if not requested:
        return dict.fromkeys(names, float("nan"))
    return {
        column: sum(level[name] for level in tops) / requested for column, name in names.items()
    }


def _rate(served: Served) -> float:
    return served.num_tokens / served.seconds


def plot(rows: Sequence[dict[str, Any]], names: Sequence[str], title: str, path: Path) -> None:
    """By phase: speed, mean draft length, share of steps without a draft."""
    columns = {
        "over_no_speculation": "tokens/s over\nno speculation",
        "per_token_over_no_speculation": "median time per token\nover no speculation",
        "draft_length": "mean draft\nlength",
        "no_draft": "share without\na draft",
    }
    phases = [row["streams"] for row in rows if row["configuration"] == names[0]]
    with saved_figure(path, 8, 8) as figure:
        panels = figure.subplots(len(columns), 1, sharex=True)
        for axes, (column, label) in zip(panels, columns.items(), strict=True):
            for name in names:
                values = [row[column] for row in rows if row["configuration"] == name]
                axes.plot(range(len(phases)), values, marker="o", label=name)
            axes.set_ylabel(label)
        panels[-1].set_xticks(range(len(phases)), [f"{streams} streams" for streams in phases])
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.suptitle(title, fontsize=8)


def main() -> int:
    parser = chat_model.options(__doc__, RESULTS / "adaptive")
    parser.add_argument("--streams", type=integers, default=[1, 64, 1, 64, 1])
    parser.add_argument("--seconds", type=float, default=60.0, help="of a phase, for each engine")
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    for sentence in missing():
        print(sentence)
    configs = configurations()
    prompts = [
        [{"role": "user", "content": text}]
        for texts in zip(*read_demo_prompts().values(), strict=True)
        for text in texts
    ]
    comparison, setup = chat_model.compared(
        options,
        list(configs.values()),
        prompts,
        batch_sizes=sorted(set(options.streams)),
        temperatures=[options.temperature],
    )
    names = list(configs)
    with Engines(comparison, setup) as engines:
        for index in range(len(names)):
            engines.get(index)
        rows = measure(engines, names, setup.prompt_ids, options)
    write_csv(options.output / "adaptive.csv", rows)
    machine = bench.describe(comparison, setup)["machine"]
    title = f"SmolLM2-135M-Instruct, {setup.dtype}, {machine}, commit {commit()}"
    plot(rows, names, title, options.output / "adaptive.png")
    print(f"Written: {options.output / 'adaptive.csv'}, {options.output / 'adaptive.png'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
