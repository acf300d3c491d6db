"""Ablations on the tiny models: what each choice does to the block efficiency.

    python -m benchmarks.ablations.run [--only NAME ...] [--output results/ablations]

Everything but the number of drafts runs through vLLM with method "hsd" on the target as trained
(not zero-padded): the figures are counts, not times, and so hold on a busy machine. Each row is the
mean over RUNS batches of the same prompts with other seeds, +- their standard deviation. The
number of drafts (trees, which vLLM's runner cannot host) runs on the reference engine.

Columns: block efficiency (tokens per target call, prefill included), redundancy (share of drafted
tokens that were thrown away) and target utilization (target calls per token); the last two are
those of "Hierarchical Speculative Decoding with Dynamic Window", section "Further Discussion".
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks.common import ENGINE_ARGS, MODELS, RESULTS, prompts, saved_figure, write_csv
from vllm_hsd.engine import EngineProcess, Generation

RUNS, PROMPTS, TOKENS = 6, 16, 96
SMALL, MID = {"model": str(MODELS / "small")}, {"model": str(MODELS / "mid")}


@dataclass
class Variant:
    """One curve: an engine, and the points at which it runs.

    Attributes:
        levels: as in the JSON.
        keys: further keys of the cascade.
        points: (x, draft_lengths or None for those of the levels, temperature).
    """

    name: str
    levels: list[dict]
    points: list[tuple[float, list[int] | None, float]]
    draft: int = 8
    keys: dict = field(default_factory=dict)


def lengths(*values: int) -> list[tuple[float, list[int], float]]:
    return [(n, [n], 1.0) for n in values]


def experiments() -> dict[str, tuple[str, list[Variant]]]:
    """Name -> (label of x, variants)."""
    entropy = {"stopping": "entropy"}
    once = [(8, None, 1.0)]
    temperatures = [(t, None, t) for t in (0.0, 0.3, 0.6, 0.8, 1.0, 1.2)]
    verifiers = ("block", "standard")
    single = [(n, [n], 1.0) for n in (4, 8, 12, 16)]
    stacked = [(n, [n, n], 1.0) for n in (4, 8, 12, 16)]
    small_below = {**SMALL, "num_tokens": 8}
    return {
        "draft length x verifier": (
            "draft length",
            [
                Variant(v, [MID], lengths(2, 4, 6, 8, 12, 16), 16, {"verifier": v})
                for v in verifiers
            ],
        ),
        "temperature x verifier": (
            "temperature",
            [Variant(v, [MID], temperatures, 8, {"verifier": v}) for v in verifiers],
        ),
        "early stopping": (
            "longest draft K",
            [
                Variant("fixed", [MID], single, 16),
                Variant("entropy", [{**MID, **entropy}], single, 16),
                Variant("fixed, two levels", [{**SMALL, "num_tokens": 16}, MID], stacked, 16),
                Variant(
                    "entropy, two levels",
                    [{**SMALL, "num_tokens": 16, **entropy}, {**MID, **entropy}],
                    stacked,
                    16,
                ),
            ],
        ),
        "pre-verify and self-verify": (
            "draft length",
            [
                Variant("SD, small", [SMALL], once),
                Variant("SD, mid", [MID], once),
                Variant("self-verify, small", [{**SMALL, **entropy}], once),
                Variant("self-verify, mid", [{**MID, **entropy}], once),
                Variant("pre-verify", [small_below, {**MID, "max_rounds": 1}], once),
                Variant(
                    "pre-verify and self-verify",
                    [{**small_below, **entropy}, {**MID, "max_rounds": 1}],
                    once,
                ),
                Variant(
                    "three stages (HSDDW)",
                    [{**small_below, **entropy}, {**MID, **entropy}],
                    once,
                ),
            ],
        ),
        "early-exit pairs": (
            "upper exit",
            [
                Variant(
                    f"lower exit {low}" if low else "one exit",
                    [{"early_exit": low, "num_tokens": 3}] * bool(low) + [{"early_exit": high}],
                    [(high, None, 1.0)],
                )
                for low in (0, 1, 2, 3, 4)
                for high in range(low + 1, 6)
            ],
        ),
        "horizontal cascade": (
            "draft length",
            [
                Variant(
                    f"{unverified} unverified tokens",
                    [{**SMALL, "num_tokens": 3}, MID],
                    once,
                    keys={"horizontal_tokens": unverified},
                )
                for unverified in (0, 2, 4)
            ],
        ),
        "draft temperature, target at 0.6": (
            "draft temperature",
            [
                Variant("mid", [{**MID, "temperature_scale": t / 0.6}], [(t, None, 0.6)])
                for t in (0.5, 0.6, 0.7, 0.8)
            ],
        ),
    }


def measure(variant: Variant, texts: list[str], log: Path) -> Iterator[dict[str, Any]]:
    """One row per point."""
    cascade = {
        "method": "hsd",
        "adaptive": False,
        "num_speculative_tokens": variant.draft,
        "levels": variant.levels,
        **variant.keys,
    }
    engine_args = {
        **ENGINE_ARGS,
        "model": str(MODELS / "target"),
        "speculative_config": cascade,
    }
    with EngineProcess(engine_args, variant.name, log=log) as engine:
        for x, draft_lengths, temperature in variant.points:
            if draft_lengths is not None:
                engine.select_levels(range(len(draft_lengths)), draft_lengths)
            runs = [engine.generate(texts, sampling(temperature, 1000 * i)) for i in range(RUNS)]
            yield {"variant": variant.name, "x": x, "temperature": temperature, **figures(runs)}


def sampling(temperature: float, seed: int) -> list[dict[str, Any]]:
    """Sampling parameters of every prompt."""
    shared = {"temperature": temperature, "max_tokens": TOKENS, "ignore_eos": True}
    return [{**shared, "seed": seed + i} for i in range(PROMPTS)]


def figures(runs: list[Generation]) -> dict[str, float]:
    """Counts of several runs of one point, as the columns of a row."""
    efficiency = [run.num_tokens / run.num_target_steps for run in runs]
    steps, tokens = sum(run.num_target_steps for run in runs), sum(run.num_tokens for run in runs)
    levels = [
        {key: sum(run.levels[i][key] for run in runs) for key in ("drafted", "accepted")}
        for i in range(len(runs[0].levels))
    ]
    # What a level passes on holds the tokens that it accepted from the level below.
    generated = levels[0]["drafted"] + sum(
        upper["drafted"] - lower["accepted"] for lower, upper in itertools.pairwise(levels)
    )
    accepted = sum(run.accepted for run in runs)
    return {
        "block_efficiency": float(np.mean(efficiency)),
        "block_efficiency_sd": float(np.std(efficiency, ddof=1)),
        "redundancy": 1 - accepted / generated,
        "target_utilization": steps / tokens,
        "generated_per_target_call": generated / steps,
    }


def measure_number_of_drafts(texts: list[str]) -> Iterator[dict[str, Any]]:
    """Block efficiency with K drafts of four tokens on the reference engine."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_hsd.reference import HuggingFaceLevel, ReferenceEngine, TreeOptions

    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    models = {n: AutoModelForCausalLM.from_pretrained(MODELS / n) for n in ("target", "small")}
    for draw in ("iid", "without_replacement"):
        for drafts in (1, 2, 4, 11):
            engine = ReferenceEngine(
                HuggingFaceLevel(models["target"]),
                [HuggingFaceLevel(models["small"])],
                draft_tree=TreeOptions(widths=(drafts, 1, 1, 1), draw=draw),
            )
            results = [
                engine.generate(tokenizer(prompt).input_ids, TOKENS // 2, seed=i)
                for i, prompt in enumerate(texts[:8])
            ]
            efficiency = [result.block_efficiency for result in results]
            calls = sum(result.target_calls for result in results)
            tokens = sum(len(result.token_ids) for result in results)
            yield {
                "variant": draw,
                "x": drafts,
                "temperature": 1.0,
                "block_efficiency": tokens / calls,
                "block_efficiency_sd": float(np.std(efficiency, ddof=1) / len(efficiency) ** 0.5),
                "redundancy": "",
                "target_utilization": calls / tokens,
                "generated_per_target_call": sum(result.drafted for result in results) / calls,
            }


def plot(rows: list[dict[str, Any]], labels: dict[str, str], path: Path) -> None:
    """One panel per ablation: block efficiency over x."""
    height = (len(labels) + 1) // 2
    with saved_figure(path, 12, 3.2 * height + 1) as figure:
        panels = figure.subplots(height, 2, squeeze=False).flat
        for axes, (name, label) in itertools.zip_longest(
            panels, labels.items(), fillvalue=("", "")
        ):
            own = [row for row in rows if row["ablation"] == name]
            if not own:
                axes.axis("off")
                continue
            axes.set(title=name, xlabel=label, ylabel="tokens per target call")
            xs = {row["x"] for row in own}
            if len(xs) == 1:
                # One point per variant: the variants are the axis.
                axes.set_xlabel(f"{label} {xs.pop():g}")
                axes.errorbar(*columns(own, "variant"), fmt="o")
                axes.tick_params("x", rotation=20, labelsize=7)
                continue
            for variant in dict.fromkeys(row["variant"] for row in own):
                points = columns([row for row in own if row["variant"] == variant], "x")
                axes.errorbar(*points, marker="o", label=variant)
            axes.legend(fontsize=7)


def columns(rows: list[dict[str, Any]], x: str) -> list[list[Any]]:
    """Values of x, block efficiency and its standard deviation."""
    return [[row[key] for row in rows] for key in (x, "block_efficiency", "block_efficiency_sd")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=RESULTS / "ablations")
    parser.add_argument("--only", nargs="*", help="names of the ablations to run")
    options = parser.parse_args()
    texts = prompts(PROMPTS)
    chosen = {k: v for k, v in experiments().items() if not options.only or k in options.only}
    labels = {name: label for name, (label, _) in chosen.items()}
    jobs = [(name, variant) for name, (_, variants) in chosen.items() for variant in variants]
    rows = [
        {"ablation": name, **row}
        for name, variant in track(jobs, "ablations")
        for row in measure(variant, texts, options.output / "engine.log")
    ]
    drafts = "number of drafts (reference engine)"
    if not options.only or drafts in options.only:
        labels[drafts] = "drafts K"
        rows += [{"ablation": drafts, **row} for row in measure_number_of_drafts(texts)]
    write_csv(options.output / "ablations.csv", rows)
    plot(rows, labels, options.output / "ablations.png")
    for row in rows:
        counts = f"{row['block_efficiency']:6.3f} +- {row['block_efficiency_sd']:.3f}"
        place = f"{row['x']:5g} temperature {row['temperature']:g}"
        print(f"{row['ablation']:36} {row['variant']:28} {place} {counts}")


if __name__ == "__main__":
    main()
