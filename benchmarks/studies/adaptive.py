"""A load that swings between one stream and many: no speculation, fixed drafts, adaptive drafts.

    python -m benchmarks.studies.adaptive        # or `make bench-adaptive`; about 30 minutes

SmolLM2-135M-Instruct answers the prompts of the demo. In a phase, so many requests are under way at
a time; all engines answer the same ones, in turn, in ROUNDS parts, and each keeps what it has
learned from one phase to the next. No speculation takes part a second time: how far equal engines
differ. Writes adaptive.csv and adaptive.png: tokens per second and median time per token over those
of no speculation, and what was chosen: mean draft length and the share of steps without a draft,
per request.
"""

import itertools
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks import plot, sweep
from benchmarks.columns import Table, chosen, times
from benchmarks.common import RESULTS, commit
from benchmarks.studies.configs import NGRAM, SUFFIX, fixed
from benchmarks.studies.demo import read_prompts
from benchmarks.sweep import Sweep, serve
from vllm_hsd.tools.cli.bench_quality import times_per_output_token
from vllm_hsd.tools.cli.options import integers, progress
from vllm_hsd.tools.engine import Generation

# Of a phase; each has 2 requests a stream, and so many at least.
ROUNDS, FEWEST = 4, 6


def configurations() -> dict[str, dict[str, Any] | None]:
    """The best lookup with fixed drafts; the same, and all lookups, adaptive."""
    return {
        "suffix, fixed": fixed(SUFFIX),
        "suffix, adaptive": fixed(SUFFIX, adaptive=True),
        "all sources, adaptive": fixed({"sources": [NGRAM, SUFFIX]}, adaptive=True),
        "no speculation, again": None,
    }


def measure(engines: Sweep, streams: Sequence[int], temperature: float) -> list[dict[str, Any]]:
    """A row per phase and configuration; `x` is the phase, the batch size its streams."""
    rows = []
    params = {**engines.params, "temperature": temperature}
    prompts, names = itertools.cycle(engines.setup.prompt_ids), engines.names
    for index in range(len(names)):
        # What was written to memory while other engines started may have left it.
        engines.engines.get(index).generate([next(prompts)], {**params, "max_tokens": 2})
    for phase, count in enumerate(streams):
        served: dict[int, list[Generation]] = {index: [] for index in range(len(names))}
        for part in range(ROUNDS):
            asked = list(itertools.islice(prompts, max(FEWEST, 2 * count)))
            for shift in range(len(names)):
                index = (phase + part + shift) % len(names)
                engine = engines.engines.get(index)
                served[index].append(serve(engine, asked, count, params))
        plain = served[0]
        for index, name in enumerate(names):
            own = served[index]
            pace, pace_of_plain = (median(times_per_output_token(all_)) for all_ in (own, plain))
            rows.append(
                {
                    "x": phase,
                    "batch_size": count,
                    "temperature": temperature,
                    "configuration": name,
                    **times(own, plain),
                    "per_token": pace / pace_of_plain,
                    **chosen(own),
                    "dtype": engines.setup.dtype,
                    "max_tokens": engines.params["max_tokens"],
                }
            )
            progress(
                f"phase {phase + 1} of {len(streams)}, {count} streams, {name}: "
                f"{rows[-1]['speedup']:.2f}"
            )
    return rows


def main() -> int:
    parser = sweep.options(__doc__, RESULTS / "adaptive")
    parser.add_argument("--streams", type=integers, default=[1, 4, 16, 64, 1])
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    prompts = [
        [{"role": "user", "content": text}]
        for texts in zip(*read_prompts().values(), strict=True)
        for text in texts
    ]
    with sweep.started(
        options,
        configurations(),
        prompts,
        batch_sizes=sorted(set(options.streams)),
        temperatures=[options.temperature],
    ) as engines:
        rows = measure(engines, options.streams, options.temperature)
    table = Table(options.output / "adaptive.csv")
    table.path.unlink(missing_ok=True)
    table.add(rows)
    plot.lines(
        table.rows,
        table.path.with_suffix(".png"),
        x="x",
        measures={
            "speedup": "tokens/s over\nno speculation",
            "per_token": "median time per token\nover no speculation",
            "draft_length": "mean draft\nlength",
            "no_draft": "share without\na draft",
        },
        xlabel=f"phase: {', '.join(map(str, options.streams))} streams",
        title=f"{options.dtype}, {table.rows[0]['machine']}, commit {commit()}",
    )
    print(f"Written: {table.path}, {table.path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
