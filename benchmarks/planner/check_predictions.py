"""Cascades for real: the best predicted and as many random others, against the planner.

    python -m benchmarks.planner.check_predictions -o results/planner

Measures a profile of the bundled models unless the output directory holds one, plans, runs the
cascades in turn in one engine and no speculation in another, and writes predictions.csv and .png. A
shared machine is not equally fast all the time: the passes that time the models for the profile run
again between these runs, and their times are what the predictions are made of.
With --family, the target is Qwen2.5-Coder 1.5B, drafted for by its 0.5B and a suffix lookup.

Times are CPU times of the engine's one model thread by default (--clock wall for wall time):
waiting for a core is left out, but not what a shared cache or a busy sibling core costs.
"""

import itertools
import os

# One thread per engine: what is measured is then comparable on shared cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
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


def measured_profile(path: Path, found: Acceptances, timing: Timing) -> Profile:
    """A new profile, by measured acceptance; the engines are timed in turn."""
    # What an earlier run recorded is of its own cascades and prompts.
    task = timing.task.fingerprint(timing.prompts, system.versions(), system.machine())
    timed = path.with_name(f"timing_{task[:12]}.json")
    latencies = timing.measure(timed)
    used = Prompts(file="prompts.jsonl", prompts=len(timing.prompts), contexts=found.positions)
    profile = make_profile(timing.task, found, used, latencies)
    profile.save(path)
    timed.unlink()
    return profile


def cascades_to_run(search: Search, rng: np.random.Generator, each: int) -> list[Selection]:
    """The `each` best predicted, best first, and as many random ones of one or two levels."""
    found = [selection for selection, _ in solve(search.graph, k=64) if selection.levels]
    best = sorted(found, key=lambda selection: search.predict(selection).ms_per_token)[:each]
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
    cascades: Sequence[Selection], timing: Timing, repeats: int, passes: Sequence[dict] = ()
) -> tuple[list[list[dict]], tuple[list[dict], list[dict]]]:
    """Recordings of every cascade, then of no speculation, all of which continue the same prompts.

    Args:
        passes: settings that time the models, run in between; of no speculation as often.

    Returns:
        recordings by cascade; and those of the passes, with and without speculation.
    """
    (batch,) = timing.task.batch_sizes
    groups: list[list[dict]] = [[] for _ in range(len(cascades) + 1)]
    timed: tuple[list[dict], list[dict]] = ([], [])
    with timing.engine(True) as speculating, timing.engine(False) as plain:
        for repeat in range(repeats):
            common = {"batch": batch, "first_prompt": repeat * batch}
            if passes:
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
                alone["emitted"] = sum(step["batch"] for step in alone["steps"])
                found.append(alone)
            for group, recording in zip(groups, found, strict=False):
                group.append(recording)
    return groups, timed


def own_latencies(timing: Timing, groups: list[list[dict]]) -> Latencies:
    """Times of these very runs: what then still differs is not the machine's doing."""
    return timing.latencies(list(itertools.chain(*groups[:-1])), groups[-1])


def spent_and_emitted(group: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Milliseconds, drafting included, and tokens of every recording: [recordings] each."""
    spent = np.array([sum(step["ms"] + step["drafting_ms"] for step in r["steps"]) for r in group])
    return spent, np.array([recording["emitted"] for recording in group])


def summary(group: list[dict], batch: int) -> tuple[float, float, float]:
    """(ms per token, its standard error, tokens per step) of one group of recordings."""
    spent, emitted = spent_and_emitted(group)
    calls = sum(step["batch"] for recording in group for step in recording["steps"])
    mean = spent.sum() / emitted.sum()
    # Standard error of a ratio of sums over repeats; of one there is none.
    freed = len(group) / (len(group) - 1) if len(group) > 1 else np.nan
    error = np.sqrt(freed * ((spent - mean * emitted) ** 2).sum()) / emitted.sum()
    return batch * mean, batch * error, emitted.sum() / calls


def write(
    directory: Path,
    names: list[str],
    predictions: list[Prediction],
    at_own_times: list[Prediction],
    real: list[tuple[float, float, float]],
    title: str,
) -> None:
    """predictions.csv and .png."""
    rows = [
        {
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
    write_csv(directory / "predictions.csv", rows)
    reach = [p.ms_per_token for p in predictions]
    equal = [
        {"cascade": "equal", "predicted_ms_per_token": end, "measured_ms_per_token": end}
        | {"standard_error": 0.0}
        for end in (0.8 * min(reach), 1.25 * max(reach))
    ]
    plot.lines(
        [*rows, *equal],
        directory / "predictions.png",
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
    parser.add_argument("--exits", nargs="*", type=int, default=[2])
    parser.add_argument("--pairs", action="store_true", help="with a bigram model")
    parser.add_argument("--ngram", action="store_true", help="with a prompt lookup")
    parser.add_argument("--bigram", action="store_true", help="with a lookup of likeliest pairs")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-draft-tokens", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--prompts", type=Path, help="default: those of the target's kind")
    parser.add_argument(
        "--repeats", type=int, default=40, help="prompts that every cascade continues"
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
            exits=arguments.exits,
            bigram_model=str(MODELS / "library.safetensors") if arguments.pairs else None,
            ngram=4 if arguments.ngram else None,
            bigram=str(MODELS / "library.safetensors") if arguments.bigram else None,
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
        batch_sizes=[arguments.batch_size],
        clock=arguments.clock,
    )
    prompts = read_prompts(arguments.prompts or own_prompts)[: arguments.repeats]
    longest = 1024 if arguments.family else 256
    contexts = [encode(models.tokenizer, prompt, longest) for prompt in prompts]
    timing = Timing(task, contexts, models.vocabulary, arguments.output)
    # That of an earlier run in the same directory, or a new one.
    path = arguments.output / "profile.json"
    if path.exists():
        del models
        profile = load_profile(path)
        asked = task.target, [each.name for each in found], task.sampling, task.max_draft_tokens
        kept = profile.target, profile.names[:-1], profile.sampling, profile.max_draft_tokens
        if asked != kept:
            parser.error(f"{path} is of another measurement: give another --output, or remove it")
    else:
        # Several texts of every prompt, many contexts: cheap on the tiny models, and less noise.
        texts, _ = REAL if arguments.family else TINY
        acceptance = measure_acceptance(models, contexts * texts, task)
        # The engines take as much memory.
        del models
        profile = measured_profile(path, acceptance, timing)
    # Drafts never pass the end of a request: short requests draft a little less.
    search = Search(
        profile, Constraints(batch=arguments.batch_size, output_tokens=arguments.tokens)
    )
    cascades = cascades_to_run(search, np.random.default_rng(arguments.seed), arguments.each)
    passes = [setting for number in range(PASSES) for setting in timing.settings(number)]
    groups, timed = run_for_real(cascades, timing, arguments.repeats, passes)
    real = [summary(group, arguments.batch_size) for group in groups]
    cascades.append(Selection((), ()))

    def predictions_with(latencies: Latencies) -> list[Prediction]:
        measured = search.measured
        search.measured = replace(measured, latencies=latencies)
        return [search.predict(selection) for selection in cascades]

    predictions = predictions_with(timing.latencies(*timed))
    at_own_times = predictions_with(own_latencies(timing, groups))
    names = [label(profile, cascade) for cascade in cascades]
    kind = "Qwen2.5-Coder 1.5B" if arguments.family else "tiny target"
    title = f"{kind}, batch size {arguments.batch_size}, {arguments.clock} time"
    write(arguments.output, names, predictions, at_own_times, real, title)

    times = np.array([ms for ms, _, _ in real])
    predicted = np.array([p.ms_per_token for p in predictions])
    rows = zip(names, predictions, at_own_times, real, strict=True)
    for name, p, own, (ms, error, tokens) in rows:
        console.print(
            f"{name:34} predicted {p.ms_per_token:7.3f}  measured {ms:7.3f} +- {error:.3f} ms/token"
            f"  {p.ms_per_token / ms - 1:+6.1%}  tokens/step {p.tokens_per_step:.2f} / {tokens:.2f}"
            f"  ms/step {p.ms_per_step / (ms * tokens) - 1:+6.1%}"
            f" (at own times {own.ms_per_step / (ms * tokens) - 1:+6.1%})"
        )
    differences = np.abs(predicted / times - 1)[:-1]
    rank = spearmanr(predicted[:-1], times[:-1]).statistic
    console.print(
        f"{title}: largest difference {differences.max():.1%}, mean {differences.mean():.1%}; "
        f"rank correlation {rank:.3f}; the chosen cascade takes {times[0] / times.min() - 1:+.1%} "
        f"of the best measured; speed-up over no speculation {times[-1] / times[0]:.2f}."
    )


if __name__ == "__main__":
    main()
