"""Cascades for real: the best predicted and as many random others, against the planner.

    python -m benchmarks.planner.check_predictions -o results/planner

Measures a profile of the bundled models unless the output directory holds one, plans, runs the
cascades in turn in one engine and no speculation in another, and writes predictions.csv and .png. A
shared machine is not equally fast all the time: the passes that time the models for the profile run
again between these runs, and their times are what the predictions are made of.
With --family, the target is Qwen2.5-Coder 1.5B, drafted for by its 0.5B and a suffix lookup. Each
kind of prompts that the file names is planned for too, at the same times, and its choice runs. The
drafter that is predicted to be fastest alone runs as well.

Times are CPU times of the engine's one model thread by default (--clock wall for wall time):
waiting for a core is left out, but not what a shared cache or a busy sibling core costs.
"""

import itertools
import json
import os

# One thread per engine: what is measured is then comparable on shared cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from scipy.stats import spearmanr

from benchmarks import plot
from benchmarks.common import MODELS, RESULTS, options, write_csv
from benchmarks.models.qwen_coder import qwen_coder
from benchmarks.studies.demo_cascade import PROMPTS
from vllm_hsd.tools import system
from vllm_hsd.tools.cli.plan import label
from vllm_hsd.tools.dtype import choose_dtype
from vllm_hsd.tools.planner.acceptance import Acceptances, measure_acceptance
from vllm_hsd.tools.planner.latencies import Latencies
from vllm_hsd.tools.planner.measure import make_profile
from vllm_hsd.tools.planner.models import ModelSet
from vllm_hsd.tools.planner.optimize import solve
from vllm_hsd.tools.planner.predict import Prediction, Selection
from vllm_hsd.tools.planner.profile import Profile, Prompts, Sampling, load_profile
from vllm_hsd.tools.planner.prompts import encode, read_prompts
from vllm_hsd.tools.planner.search import Constraints, Search
from vllm_hsd.tools.planner.task import Task, candidates
from vllm_hsd.tools.planner.timing import PASSES, Timing

ENGINE = {
    "enforce_eager": True,
    "max_model_len": 512,
    "kv_cache_memory_bytes": 1 << 29,
}


# No speculation is run on every so many prompts, and timed before each over so many tokens.
PLAIN_EVERY, PLAIN_TOKENS = 4, 16
# Texts that the profile's acceptance is measured on, per prompt, and contexts of own texts: of the
# tiny models, and of the family, whose texts take longer.
TINY, REAL = (4, 2048), (1, 256)


ALL = "all"


def by_kind(file: Path, count: int) -> dict[str, list[int]]:
    """Indices of the first `count` prompts: all of them, and those of each kind that lines name."""
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else []
    entries = [json.loads(line) for line in lines if line.strip()][:count]
    kinds: dict[str, list[int]] = {ALL: list(range(count))}
    for index, entry in enumerate(entries):
        if kind := entry.get("kind"):
            kinds.setdefault(kind, []).append(index)
    return kinds


def measured_profiles(
    paths: Mapping[str, Path], found: Mapping[str, Acceptances], timing: Timing
) -> dict[str, Profile]:
    """New profiles, by measured acceptance; the engines are timed in turn, once for all."""
    path = paths[ALL]
    # What an earlier run recorded is of its own cascades and prompts.
    task = timing.task.fingerprint(timing.prompts, system.versions(), system.machine())
    timed = path.with_name(f"timing_{task[:12]}.json")
    latencies = timing.measure(timed)
    profiles = {}
    for kind, each in found.items():
        used = Prompts(file="prompts.jsonl", prompts=len(timing.prompts), contexts=each.positions)
        profiles[kind] = make_profile(timing.task, each, used, latencies)
        profiles[kind].save(paths[kind])
    timed.unlink()
    return profiles


def fastest(search: Search, count: int) -> list[Selection]:
    """The cascades predicted to be fastest, best first."""
    found = [selection for selection, _ in solve(search.graph, k=64) if selection.levels]
    return sorted(found, key=lambda selection: search.predict(selection).ms_per_token)[:count]


def cascades_to_run(search: Search, rng: np.random.Generator, each: int) -> list[Selection]:
    """The `each` best predicted, best first, and as many random ones of one or two levels."""
    best = fastest(search, each)
    lookups = search.measured.acceptance.lookups
    while len(best) < 2 * each:
        depth = int(rng.integers(1, 3))
        nodes = np.sort(rng.choice(len(search.graph.order), size=depth, replace=False))
        lengths = np.sort(rng.choice(np.arange(1, search.size + 1), size=depth, replace=False))
        levels = tuple(search.graph.order[node] for node in nodes)
        selection = Selection(levels, tuple(lengths.tolist()))
        if selection not in best and not set(levels[1:]) & set(lookups):
            best.append(selection)
    return best


def run_for_real(
    cascades: Sequence[Selection], timing: Timing, repeats: int, passes: Sequence[dict]
) -> tuple[list[list[dict]], tuple[list[dict], list[dict]]]:
    """Recordings of every cascade, then of no speculation, all of which continue the same prompts.

    Args:
        passes: settings that time the models, run in between; of no speculation as often.

    Returns:
        recordings by cascade; and those of the passes, with and without speculation.
    """
    groups: list[list[dict]] = [[] for _ in range(len(cascades) + 1)]
    timed: tuple[list[dict], list[dict]] = ([], [])
    with timing.engine(True) as speculating, timing.engine(False) as plain:
        for repeat in range(repeats):
            common = {"batch": 1, "first_prompt": repeat}
            timed[0].extend(timing.run(speculating, passes[repeat::repeats]))
            alone = {**timing.plain_settings(repeat)[0], "tokens": PLAIN_TOKENS}
            timed[1].extend(timing.run(plain, [alone]))
            common["tokens"] = timing.task.text_tokens
            settings = [
                {"levels": list(c.levels), "draft_lengths": list(c.draft_lengths), **common}
                for c in cascades
            ]
            found = timing.run(speculating, settings)
            # Without acceptance there is little to average over.
            if repeat % PLAIN_EVERY == 0:
                (alone,) = timing.run(plain, [{"levels": [], "draft_lengths": [], **common}])
                alone["emitted"] = len(alone["steps"])
                found.append(alone)
            for group, recording in zip(groups, found, strict=False):
                group.append(recording)
    return groups, timed


def own_latencies(timing: Timing, groups: list[list[dict]]) -> Latencies:
    """Times of these very runs: what then still differs is not the machine's doing."""
    return timing.latencies(list(itertools.chain(*groups[:-1])), groups[-1])


def summary(group: list[dict]) -> tuple[float, float, float]:
    """(ms per token, its standard error, tokens per step) of one group of recordings."""
    # Drafting included.
    spent = np.array([sum(step["ms"] + step["drafting_ms"] for step in r["steps"]) for r in group])
    emitted = np.array([recording["emitted"] for recording in group])
    calls = sum(len(recording["steps"]) for recording in group)
    mean = spent.sum() / emitted.sum()
    # Standard error of a ratio of sums over repeats; of one there is none.
    freed = len(group) / (len(group) - 1) if len(group) > 1 else np.nan
    error = np.sqrt(freed * ((spent - mean * emitted) ** 2).sum()) / emitted.sum()
    return mean, error, emitted.sum() / calls


def predicted(search: Search, cascades: list[Selection], times: Latencies) -> list[Prediction]:
    """By the acceptance of a search, with other times than its own."""
    measured = search.measured
    search.measured = replace(measured, latencies=times)
    predictions = [search.predict(selection) for selection in cascades]
    search.measured = measured
    return predictions


def compared(
    kind: str,
    names: list[str],
    predictions: list[Prediction],
    at_own_times: list[Prediction],
    real: list[tuple[float, float, float]],
) -> list[dict]:
    """Rows of predictions.csv."""
    return [
        {
            "kind": kind,
            "cascade": name,
            "predicted_ms_per_token": predicted.ms_per_token,
            "measured_ms_per_token": ms,
            "standard_error": error,
            "difference": f"{predicted.ms_per_token / ms - 1:+.4f}",
            "predicted_tokens_per_step": predicted.tokens_per_step,
            "measured_tokens_per_step": tokens,
            "predicted_ms_per_token_at_own_times": at_own.ms_per_token,
        }
        for name, predicted, at_own, (ms, error, tokens) in zip(
            names, predictions, at_own_times, real, strict=True
        )
    ]


def draw(path: Path, rows: list[dict], title: str) -> None:
    """Predicted times of all prompts against those measured."""
    reach = [row["predicted_ms_per_token"] for row in rows]
    equal = [
        {"cascade": "equal", "predicted_ms_per_token": end, "measured_ms_per_token": end}
        | {"standard_error": 0.0}
        for end in (0.8 * min(reach), 1.25 * max(reach))
    ]
    plot.lines(
        [*rows, *equal],
        path,
        x="predicted_ms_per_token",
        measures={"measured_ms_per_token": "measured ms per token (one standard error)"},
        line="cascade",
        error="standard_error",
        title=title,
        xscale="log",
        yscale="log",
    )


def main() -> None:
    parser = options(__doc__, RESULTS / "predictions")
    parser.add_argument("--family", action="store_true", help="Qwen2.5-Coder 1.5B and 0.5B")
    parser.add_argument("--each", type=int, default=5, help="best and random cascades to run")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-draft-tokens", type=int, default=12)
    parser.add_argument("--prompts", type=Path, help="default: those of the target's kind")
    parser.add_argument(
        "--repeats", type=int, default=40, help="answers of every cascade, prompts in turn"
    )
    parser.add_argument(
        "--tokens", type=int, default=96, help="tokens of every continuation, profile included"
    )
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    console = Console(soft_wrap=True)

    engine: dict[str, object] = {}
    if arguments.family:
        source = target = os.path.relpath(qwen_coder("1.5B"))
        own_prompts, dtype = PROMPTS, choose_dtype(source).dtype
        found = candidates(models=[os.path.relpath(qwen_coder("0.5B"))], suffix="")
        engine["max_model_len"] = 2048
    else:
        source = target = str(MODELS / "target")
        own_prompts, dtype = MODELS / "prompts.jsonl", "float32"
        found = candidates(
            models=[str(MODELS / name) for name in ("small", "mid")],
            exits=[2],
        )
    models = ModelSet(source, found)
    task = Task(
        target=target,
        candidates=found,
        sampling=Sampling(temperature=arguments.temperature),
        max_draft_tokens=arguments.max_draft_tokens,
        text_tokens=arguments.tokens,
        contexts=(REAL if arguments.family else TINY)[1],
        engine_args={**ENGINE, "dtype": dtype, **engine},
        batch_sizes=[1],
        clock=arguments.clock,
    )
    file = arguments.prompts or own_prompts
    prompts = read_prompts(file)[: arguments.repeats]
    kinds = by_kind(file, len(prompts))
    longest = 1024 if arguments.family else 256
    contexts = [encode(models.tokenizer, prompt)[-longest:] for prompt in prompts]
    timing = Timing(task, contexts, models.vocabulary, arguments.output)
    # Those of an earlier run in the same directory, or new ones.
    paths = {kind: arguments.output / f"profile of {kind}.json" for kind in kinds}
    if all(path.exists() for path in paths.values()):
        del models
        profiles = {kind: load_profile(path) for kind, path in paths.items()}
        asked = task.target, [each.name for each in found], task.sampling, task.max_draft_tokens
        for kind, each in profiles.items():
            kept = each.target, each.names[:-1], each.sampling, each.max_draft_tokens
            if asked != kept:
                parser.error(
                    f"{paths[kind]} is of another measurement: give another --output, or remove it"
                )
    else:
        # Several texts of every prompt, many contexts: cheap on the tiny models, and less noise.
        texts, _ = REAL if arguments.family else TINY
        threads = torch.get_num_threads()
        # No engine runs yet.
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        acceptances = {}
        for kind, indices in kinds.items():
            # As many contexts of own texts for each prompt of a kind as for each of all.
            share = replace(task, contexts=task.contexts * len(indices) // len(contexts))
            repeated = [contexts[i] for i in indices] * texts
            acceptances[kind] = measure_acceptance(models, repeated, share)
        torch.set_num_threads(threads)
        # The engines take as much memory.
        del models
        profiles = measured_profiles(paths, acceptances, timing)
    # Drafts never pass the end of a request: short requests draft a little less.
    constraints = Constraints(output_tokens=arguments.tokens)
    searches = {kind: Search(profile, constraints) for kind, profile in profiles.items()}
    cascades = cascades_to_run(searches[ALL], np.random.default_rng(arguments.seed), arguments.each)
    chosen = {kind: fastest(search, 1)[0] for kind, search in searches.items()}
    singles = [search.choose().single.selection for search in searches.values()]
    cascades = list(dict.fromkeys([*cascades, *chosen.values(), *singles]))
    passes = [setting for number in range(PASSES) for setting in timing.settings(number)]
    groups, timed = run_for_real(cascades, timing, arguments.repeats, passes)
    latencies, own = timing.latencies(*timed), own_latencies(timing, groups)
    names = [label(profiles[ALL], cascade) for cascade in [*cascades, Selection((), ())]]
    target = "Qwen2.5-Coder 1.5B" if arguments.family else "tiny target"
    title = f"{target}, {arguments.clock} time"
    rows = []
    for kind, indices in kinds.items():
        # No speculation runs on few prompts: on none of some kinds.
        runs = [
            [each for i, each in enumerate(group) if i % len(contexts) in indices]
            for group in groups[:-1]
        ]
        selections = list(cascades)
        if kind == ALL:
            runs, selections = groups, [*cascades, Selection((), ())]
        real = [summary(group) for group in runs]
        predictions, at_own_times = (
            predicted(searches[kind], selections, times) for times in (latencies, own)
        )
        rows += compared(kind, names[: len(real)], predictions, at_own_times, real)
        console.print(f"{kind}:")
        for name, p, own_time, (ms, error, tokens) in zip(
            names, predictions, at_own_times, real, strict=False
        ):
            console.print(
                f"{name:34} predicted {p.ms_per_token:7.3f}  measured {ms:7.3f} +- {error:.3f} "
                f"ms/token  {p.ms_per_token / ms - 1:+6.1%}  tokens/step {p.tokens_per_step:.2f} / "
                f"{tokens:.2f}  ms/step {p.ms_per_step / (ms * tokens) - 1:+6.1%} (at own times "
                f"{own_time.ms_per_step / (ms * tokens) - 1:+6.1%})"
            )
        times = np.array([ms for ms, _, _ in real[: len(cascades)]])
        expected = np.array([p.ms_per_token for p in predictions[: len(cascades)]])
        differences = np.abs(expected / times - 1)
        choice = cascades.index(chosen[kind])
        console.print(
            f"{title}: largest difference {differences.max():.1%}, mean {differences.mean():.1%}; "
            f"rank correlation {spearmanr(expected, times).statistic:.3f}; the chosen cascade, "
            f"{names[choice]}, takes {times[choice] / times.min() - 1:+.1%} of the best measured."
        )
    write_csv(arguments.output / "predictions.csv", rows)
    draw(arguments.output / "predictions.png", [r for r in rows if r["kind"] == ALL], title)


if __name__ == "__main__":
    main()
